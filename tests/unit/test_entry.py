"""A user's own workload in the plan: where it is, what it takes, what it depends on; no import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from halfscale.config import ConfigError
from halfscale.entry import Entry, EntryError, find_entry, read_signature
from halfscale.imported import entry_digest, source_files, stop_if_edited
from halfscale.plan import Plan, WorkloadPlan
from halfscale.planner import build_plan
from halfscale.sources import TRAINING, source_digest

BUILD = "def build(seed, device, *, width=8, rate: float = 1, name='a', deep=False):\n    ...\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a file that can be used."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(BUILD)
    return tmp_path


def plan(block: object, name: str = "mine", **others: object) -> Plan:
    workloads = {name: block, **others}
    return build_plan({"configurations": {"a": {}}, "workloads": workloads, "device": "cpu"}, "c")


def planned(**keys: object) -> WorkloadPlan:
    return plan({"entry": "mine.py:build", **keys}).workloads["mine"]


def refusal(block: object, name: str = "mine", **others: object) -> tuple[str, Any]:
    """The reason of a refusal and the block it tells to write."""
    with pytest.raises(ConfigError) as caught:
        plan(block, name, **others)
    text = str(caught.value)
    assert len(text.splitlines()) == 1, text
    reason, _, block = text.partition("; write: ")
    assert reason.startswith(f"c: workloads.{name}")
    return reason, yaml.safe_load(block)["workloads"]


def entry_refusal(text: object) -> tuple[str, str]:
    """Why an entry is refused, after its place and value, and the entry to write."""
    reason, block = refusal({"entry": text})
    shown = f"c: workloads.mine.entry: {text!r:.60}: "
    assert reason.startswith(shown), reason
    return reason.removeprefix(shown), block["mine"]["entry"]


def write(file: str, text: str) -> None:
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


# Parameters.


def test_an_entry_and_its_code_are_part_of_the_specification() -> None:
    block = planned(steps=7)
    assert block.entry == "mine.py:build"
    assert block.steps == 7
    assert block.parameters == {"width": 8, "rate": 1.0, "name": "a", "deep": False}
    digest = entry_digest(find_entry("mine.py:build"))
    assert block.source == f"{source_digest(*TRAINING)}+{digest}"
    spec = plan({"entry": "mine.py:build"}).run("mine", "fp32", 0)
    assert (spec.entry, spec.source) == (block.entry, block.source)
    assert '"entry":"mine.py:build"' in spec.canonical_json()


def test_a_built_in_workload_has_no_entry() -> None:
    assert plan({}, "binary").run("binary", "fp32", 0).entry is None


def test_parameters_have_the_type_of_their_default_or_annotation() -> None:
    block = planned(width="2**4", rate="1e-3", name="b", deep=True)
    assert block.parameters == {"width": 16, "rate": 0.001, "name": "b", "deep": True}
    assert type(block.parameters["width"]) is int
    assert planned(width=8.0, rate=1) == planned()


def test_a_default_that_is_no_literal_is_left_out_but_may_be_given() -> None:
    write("mine.py", "import x\ndef build(seed, device, size=x.SIZE, low=-1, rate=None): ...\n")
    assert planned().parameters == {"low": -1}
    assert planned(size="2**3", rate="fast").parameters == {"low": -1, "size": 8, "rate": "fast"}
    assert planned(size=True).parameters["size"] is True


def test_a_default_that_no_specification_can_hold_is_left_out() -> None:
    write("mine.py", "def build(seed, device, most=1e999, sizes=(1, 2)): ...\n")
    assert planned().parameters == {}


@pytest.mark.parametrize(
    ("annotation", "given", "value"),
    [
        ("float", 1, 1.0),
        ("float | None", "1e-2", 0.01),
        ("Optional[int]", "0x10", 16),
        ("str", "1e-2", "1e-2"),
        ("bool", False, False),
        ("'float'", 2, 2.0),
        ("int | float", "1e2", 100.0),
    ],
)
def test_an_annotation_says_the_type_where_there_is_no_default(
    annotation: str, given: object, value: object
) -> None:
    write("mine.py", f"def build(seed, device, *, x: {annotation}): ...\n")
    found = planned(x=given).parameters["x"]
    assert (found, type(found)) == (value, type(value))


def test_further_keywords_are_accepted_if_build_takes_any() -> None:
    write("mine.py", "def build(seed, device, **kwargs): ...\n")
    assert planned(x=3, y="text").parameters == {"x": 3, "y": "text"}


def test_a_build_with_steps_is_given_those_of_the_run() -> None:
    write("mine.py", "def build(seed, device, *, steps): ...\n")
    assert planned(steps=30).parameters == {"steps": 30}


def test_a_parameter_without_default_must_be_given() -> None:
    write("mine.py", "def build(seed, device, *, width: int, rate: float, depth=2): ...\n")
    reason, block = refusal({"entry": "mine.py:build", "rate": 0.5})
    assert reason.endswith(": width must be given, having no default")
    assert block == {"mine": {"entry": "mine.py:build", "rate": 0.5, "width": 1}}
    assert plan(block["mine"]).workloads["mine"].parameters == {"depth": 2, "rate": 0.5, "width": 1}


def test_an_unknown_parameter_is_refused_with_those_it_has() -> None:
    reason, block = refusal({"entry": "mine.py:build", "widht": 3})
    assert reason == (
        "c: workloads.mine.widht: 3: unknown key; mine has steps, width, rate, name, deep"
    )
    assert block == {"mine": {"entry": "mine.py:build", "width": 8}}


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("width", 1.5, "must be a whole number"),
        ("width", None, "is not a number"),
        ("width", [8, 8], "is not a number"),
        ("rate", "fast", "is not a number"),
        ("name", 3, "must be a str, like the default 'a'"),
        ("deep", 1, "must be a bool, like the default False"),
    ],
)
def test_a_parameter_of_another_type_is_refused(key: str, value: object, reason: str) -> None:
    found, block = refusal({"entry": "mine.py:build", key: value})
    assert found == f"c: workloads.mine.{key}: {value!r}: {reason}"
    assert plan(block["mine"])


def test_a_string_is_asked_for_where_only_the_annotation_is_known() -> None:
    write("mine.py", "def build(seed, device, *, path: str): ...\n")
    reason, block = refusal({"entry": "mine.py:build", "path": 3})
    assert reason.endswith(": 3: must be a str")
    assert plan(block["mine"])


# Names.


@pytest.mark.parametrize(
    ("name", "fault", "better"),
    [
        ("digits", "is that of a built-in workload", "my-digits"),
        ("Digits", "differs from 'digits' only in case", "Digits-2"),
        ("fp32", "is the name of a control, which is always run", "my-fp32"),
        ("a/b", "is not usable as a folder name: use letters, digits, '-', '_' and '.', a", "a-b"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused_with_one_that_can(
    name: str, fault: str, better: str
) -> None:
    reason, block = refusal({"entry": "mine.py:build", "width": 4}, name)
    assert f": {name!r}: the name {fault}" in reason
    assert block == {better: {"entry": "mine.py:build", "width": 4}}
    assert plan(block[better], better)


def test_two_names_that_differ_in_case_are_refused() -> None:
    reason, block = refusal(
        {"entry": "mine.py:build"}, "Mine", mine={"entry": "mine.py:build", "width": 2}
    )
    assert reason.endswith("the name differs from 'mine' only in case")
    assert list(block) == ["Mine-2"]


def test_an_unknown_workload_is_told_how_to_name_its_own() -> None:
    reason, _ = refusal({"steps": 5})
    assert "one of your own has an entry: path/to/file.py:build" in reason


# Where it is.


def test_one_place_has_one_spelling(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("sub/model.py", BUILD)
    for text in ("sub/model.py:build", "./sub//model.py:build", " sub/../sub/model.py:build "):
        assert find_entry(text).text == "sub/model.py:build"
    assert find_entry(f"{folder}/mine.py:build").text == f"{folder}/mine.py:build"
    monkeypatch.setenv("HOME", str(folder))
    assert find_entry("~/mine.py:build").text == f"{folder}/mine.py:build"


def test_an_entry_names_its_file_relative_to_the_working_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("elsewhere/note", "")
    monkeypatch.chdir(folder / "elsewhere")
    assert find_entry("../mine.py:build").file == Path("../mine.py")
    reason, better = entry_refusal("mine.py:build")
    assert reason == (
        f"no such file; paths are relative to the working directory, {folder / 'elsewhere'}"
    )
    assert better == "path/to/file.py:build"


def test_a_missing_file_is_refused_with_the_closest_one(folder: Path) -> None:
    write("my_model.py", BUILD)
    reason, better = entry_refusal("my_modle.py:build")
    assert reason == f"no such file; paths are relative to the working directory, {folder}"
    assert better == "my_model.py:build"
    assert entry_refusal(f"{folder}/nowhere/a.py:build")[0] == "no such file"
    assert entry_refusal("nowhere.py:build")[0].startswith("no such file; ")


def test_a_folder_is_refused_with_a_file_in_it(folder: Path) -> None:
    write("models/net.py", BUILD)
    reason, better = entry_refusal("./models:build")
    assert reason.startswith("is a folder; ")
    assert better == "models/net.py:build"


@pytest.mark.parametrize(
    ("text", "reason", "better"),
    [
        ("mine.py", "has no colon before the function's name", "mine.py:build"),
        ("mine", "has no colon before the function's name", "mine:build"),
        ("mine.py:", "'' is not the name of a function", "mine.py:build"),
        ("mine.py:a b", "'a b' is not the name of a function", "mine.py:build"),
        ("", "must name a file and a function", "path/to/file.py:build"),
        (None, "must name a file and a function", "path/to/file.py:build"),
        (3, "must name a file and a function", "path/to/file.py:build"),
        (["mine.py:build"], "must name a file and a function", "path/to/file.py:build"),
    ],
)
def test_a_text_that_is_no_entry_is_refused(text: object, reason: str, better: str) -> None:
    assert entry_refusal(text) == (reason, better)


def test_a_missing_function_is_refused_with_the_closest_one() -> None:
    write("mine.py", "def make(): ...\ndef biuld(seed, device): ...\nclass build: ...\n")
    reason, better = entry_refusal("mine.py:build")
    assert reason == ("mine.py defines no function 'build' at its top level; it has make, biuld")
    assert better == "mine.py:biuld"
    write("mine.py", "x = 1\n")
    reason, better = entry_refusal("mine.py:build")
    assert reason == "mine.py defines no function 'build' at its top level; it has none"


@pytest.mark.parametrize(
    ("head", "count"), [("", 0), ("seed", 1), ("*, seed, device", 0), ("seed, *, device", 1)]
)
def test_a_build_without_seed_and_device_is_refused(head: str, count: int) -> None:
    write("mine.py", f"def build({head}): ...\n")
    assert entry_refusal("mine.py:build")[0] == (
        f"build takes {count} positional parameters, but is called with two; "
        "begin it with: def build(seed, device, ...)"
    )


@pytest.mark.parametrize("head", ["s, d", "s, d, /", "*args", "seed, device=None", "a=1, b=2, c=3"])
def test_a_build_that_can_be_called_is_accepted(head: str) -> None:
    write("mine.py", f"def build({head}): ...\n")
    assert planned().entry


@pytest.mark.parametrize("head", ["seed, device, width, /", "seed, device, *, entry"])
def test_a_parameter_that_no_key_can_set_is_refused(head: str) -> None:
    write("mine.py", f"def build({head}): ...\n")
    reason, _ = entry_refusal("mine.py:build")
    assert reason.endswith("cannot be set by its name; rename it or give it a default")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("x = 1\ndef build(:\n", "mine.py, line 2 is not Python: invalid syntax"),
        ("x = (\n", "mine.py, line 1 is not Python: '(' was never closed"),
        ("\0", "mine.py"),
    ],
)
def test_a_file_that_is_not_python_is_refused_with_its_line(content: str, reason: str) -> None:
    write("mine.py", content)
    found, _ = entry_refusal("mine.py:build")
    assert found.startswith(reason)
    assert "is not Python: " in found


# Installed packages.


@pytest.fixture
def package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package whose modules must not be imported."""
    site = folder / "site"
    boom = "raise AssertionError('imported while planning')\n"
    write("site/nets/__init__.py", "from . import tools\n" + boom)
    write("site/nets/tools.py", boom)
    write("site/nets/small/__init__.py", boom)
    write("site/nets/small/model.py", "import torch\nfrom ..layers import linear\n" + BUILD + boom)
    write("site/nets/layers/__init__.py", "")
    write("site/nets/layers/linear.py", "from nets import shapes\nimport other\n")
    write("site/nets/shapes.py", "")
    write("site/nets/unused.py", "")
    write("site/single.py", BUILD)
    write("site/other.py", "")
    monkeypatch.syspath_prepend(site)
    return site / "nets"


def test_an_installed_function_is_found_without_importing_it(package: Path) -> None:
    block = plan({"entry": "nets.small.model:build"}).workloads["mine"]
    assert block.entry == "nets.small.model:build"
    assert block.parameters["width"] == 8
    assert "nets" not in sys.modules
    assert find_entry("single:build").file == package.parent / "single.py"


def test_a_package_depends_on_its_own_modules_only(package: Path) -> None:
    assert sorted(source_files(find_entry("nets.small.model:build"))) == [
        "nets/__init__.py",
        "nets/layers/__init__.py",
        "nets/layers/linear.py",
        "nets/shapes.py",
        "nets/small/__init__.py",
        "nets/small/model.py",
        "nets/tools.py",
    ]
    assert list(source_files(find_entry("single:build"))) == ["single.py"]


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("text", "reason", "better"),
    [
        (
            "netz.model:build",
            "no package 'netz' is installed; a file is named with its .py",
            "netz/model.py:build",
        ),
        (
            "mine:build",
            "no package 'mine' is installed; a file is named with its .py",
            "mine.py:build",
        ),
        (
            "nets.small.modle:build",
            "package 'nets' has no module 'nets.small.modle' of Python source",
            "nets.small.model:build",
        ),
        ("sys:build", "'sys' is no package of Python source files", "path/to/file.py:build"),
        (
            "single.x:build",
            "'single' is no package of Python source files",
            "path/to/file.py:build",
        ),
        (
            "a-b:build",
            "no package 'a-b' is installed; a file is named with its .py",
            "a-b.py:build",
        ),
    ],
)
def test_a_package_or_module_that_is_not_there_is_refused(
    text: str, reason: str, better: str
) -> None:
    assert entry_refusal(text) == (reason, better)


# What it depends on.


def test_siblings_and_their_packages_are_found_recursively() -> None:
    write("mine.py", "import helper, os\nfrom nets.deep import layers\n" + BUILD)
    write("helper.py", "def f():\n    from . import late\n    import nets.plain\n")
    write("late.py", "")
    write("nets/plain.py", "")
    write("nets/deep/__init__.py", "from ..plain import x\n")
    write("nets/deep/layers.py", "from .activations import relu\nfrom ... import beyond\n")
    write("nets/deep/activations.py", "import mine\n")
    write("beyond.py", "")
    for unrelated in ("other.py", "nets/other.py", "nets/deep/other.py", "halfscale/plots.py"):
        write(unrelated, "")
    assert sorted(source_files(find_entry("mine.py:build"))) == [
        "beyond.py",
        "helper.py",
        "late.py",
        "mine.py",
        "nets/deep/__init__.py",
        "nets/deep/activations.py",
        "nets/deep/layers.py",
        "nets/plain.py",
    ]


def test_the_digest_changes_with_exactly_those_files() -> None:
    write("mine.py", "import helper\n" + BUILD)
    write("helper.py", "x = 1\n")
    write("other.py", "x = 1\n")
    seen = [planned().source]
    for file in ("helper.py", "mine.py", "other.py"):
        path = Path(file)
        path.write_text(path.read_text() + "# edited\n")
        seen.append(planned().source)
    assert len(set(seen)) == 3
    assert seen[-1] == seen[-2]
    for path in Path().glob("*.py"):
        os.utime(path, (1, 1))
    assert planned().source == seen[-1]


def test_the_digest_sees_a_module_that_comes_and_bytes_that_move() -> None:
    write("mine.py", "import helper\n" + BUILD)
    seen = {planned().source}
    write("helper.py", "x = 1\n")
    seen.add(planned().source)
    write("helper/__init__.py", "x = 1\n")
    seen.add(planned().source)
    assert len(seen) == 3


def test_a_sibling_that_is_not_python_counts_with_its_bytes() -> None:
    write("mine.py", "import helper\n" + BUILD)
    write("helper.py", "def (\n")
    assert sorted(source_files(find_entry("mine.py:build"))) == ["helper.py", "mine.py"]


def test_an_edit_after_planning_stops_the_run() -> None:
    source = planned().source
    stop_if_edited("mine.py:build", source)
    write("mine.py", BUILD + "\n")
    with pytest.raises(RuntimeError, match=r"mine\.py:build or a module it imports was edited"):
        stop_if_edited("mine.py:build", source)
    Path("mine.py").unlink()
    with pytest.raises(EntryError, match="no such file"):
        stop_if_edited("mine.py:build", source)


def test_only_the_users_own_files_are_owned(folder: Path) -> None:
    entry = find_entry("mine.py:build")
    assert entry.owns(folder / "mine.py")
    assert entry.owns(folder / "nets" / "deep.py")
    assert not entry.owns(folder.parent / "mine.py")
    assert not entry.owns(folder / ".venv/lib/python3/site-packages/torch/nn.py")
    installed = Entry("nets:build", folder / "nets.py", "build", folder, "nets")
    assert installed.owns(folder / "nets" / "deep.py")
    assert not installed.owns(folder / "torch" / "nn.py")


def test_a_signature_keeps_the_last_definition() -> None:
    write("mine.py", "def build(seed, device, a=1): ...\ndef build(seed, device, b=2): ...\n")
    assert read_signature(find_entry("mine.py:build")).defaults == {"b": 2}


def test_planning_imports_neither_torch_nor_the_users_file() -> None:
    write("mine.py", "raise SystemExit('imported')\n" + BUILD)
    program = (
        "import sys\nfrom halfscale.planner import build_plan\n"
        "build_plan({'configurations': {'a': {}}, 'device': 'cpu',"
        " 'workloads': {'mine': {'entry': 'mine.py:build'}}})\n"
        "print('torch' in sys.modules)\n"
    )
    import halfscale

    environment = os.environ | {"PYTHONPATH": str(Path(halfscale.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.stdout.strip() == "False", done.stderr
