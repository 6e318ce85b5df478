"""Bad configurations: one line that names file, key and value, and a block that mends it."""

from __future__ import annotations

import math
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from halfscale.config import ConfigError, read_config
from halfscale.plan import Plan
from halfscale.planner import build_plan
from halfscale.policies import POLICIES

GOOD: dict[str, Any] = {
    "configurations": {"default": {"init_scale": 1024}},
    "workloads": {"binary": {"steps": 10}},
    "seeds": [0, 1],
    "device": "cpu",
    "threads": 1,
}


def check(path: Path) -> Plan:
    return build_plan(read_config(path), str(path))


def refusal(path: Path, content: str | dict[str, Any]) -> str:
    text = content if isinstance(content, str) else yaml.safe_dump(content)
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        check(path)
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    assert message.startswith(str(path))
    return message


def lay(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = lay(old, value) if both else value  # type: ignore[arg-type]
    return merged


def assert_block_mends(path: Path, content: dict[str, Any], keys: tuple[str, ...]) -> Plan:
    """Refuse ``content``, put the suggested block in place of ``keys``, and accept the result."""
    message = refusal(path, content)
    if all(key.isprintable() for key in keys):
        assert f": {'.'.join(keys)}: " in message
    block = yaml.safe_load(message.partition("; write: ")[2])
    without: Any = deepcopy(content)
    inner = without
    for key in keys[:-1]:
        inner = inner[key]
    inner.pop(keys[-1], None)
    path.write_text(yaml.safe_dump(lay(without, block)), encoding="utf-8")
    return check(path)


def with_value(*keys_and_value: Any) -> dict[str, Any]:
    """The good configuration with one value replaced."""
    *keys, value = keys_and_value
    content = deepcopy(GOOD)
    inner = content
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    return content


def scaler(key: str, value: object) -> tuple[dict[str, Any], tuple[str, ...], object]:
    keys = ("configurations", "default", key)
    return with_value(*keys, value), keys, value


BAD_VALUES = [
    scaler("init_scal", 4096),
    scaler("growthfactor", 3),
    scaler("zzz", "what"),
    scaler("init_scale", 0),
    scaler("init_scale", -1),
    scaler("init_scale", math.nan),
    scaler("init_scale", math.inf),
    scaler("init_scale", "many"),
    scaler("init_scale", None),
    scaler("init_scale", True),
    scaler("init_scale", [1, 2]),
    scaler("init_scale", {"a": 1}),
    scaler("init_scale", "2**"),
    scaler("init_scale", "2**99999"),
    scaler("growth_factor", 1),
    scaler("growth_factor", 0.5),
    scaler("growth_factor", -2),
    scaler("backoff_factor", 1),
    scaler("backoff_factor", 2),
    scaler("backoff_factor", 0),
    scaler("backoff_factor", -0.5),
    scaler("growth_interval", 0),
    scaler("growth_interval", -3),
    scaler("growth_interval", 2.5),
    scaler("growth_interval", math.inf),
    (with_value("configurations", {}), ("configurations",), {}),
    (with_value("configurations", None), ("configurations",), None),
    (with_value("configurations", ["default"]), ("configurations",), ["default"]),
    (with_value("configurations", "default", 5), ("configurations", "default"), 5),
    (with_value("seeds", []), ("seeds",), []),
    (with_value("seeds", [3, 1, 3]), ("seeds",), [3, 1, 3]),
    (with_value("seeds", [0, -1]), ("seeds",), -1),
    (with_value("seeds", [0, 1.5]), ("seeds",), 1.5),
    (with_value("seeds", ["a"]), ("seeds",), "a"),
    (with_value("seeds", 5), ("seeds",), 5),
    (with_value("workloads", {}), ("workloads",), {}),
    (with_value("workloads", None), ("workloads",), None),
    (with_value("workloads", ["binary"]), ("workloads",), ["binary"]),
    (with_value("workloads", "binry", {"steps": 20}), ("workloads", "binry"), "binry"),
    (with_value("workloads", "binary", 7), ("workloads", "binary"), 7),
    (with_value("workloads", "binary", "steps", 1), ("workloads", "binary", "steps"), 1),
    (with_value("workloads", "binary", "steps", "x"), ("workloads", "binary", "steps"), "x"),
    (with_value("workloads", "binary", "stpes", 50), ("workloads", "binary", "stpes"), 50),
    (with_value("workloads", "binary", "hiden", 3), ("workloads", "binary", "hiden"), 3),
    (with_value("workloads", "binary", "hidden", 3.5), ("workloads", "binary", "hidden"), 3.5),
    (
        with_value("workloads", "binary", "learning_rate", "fast"),
        ("workloads", "binary", "learning_rate"),
        "fast",
    ),
    (with_value("device", "gpu"), ("device",), "gpu"),
    (with_value("device", "cuda"), ("device",), "cuda"),
    (with_value("threads", 0), ("threads",), 0),
    (with_value("runs_per_gpu", 0), ("runs_per_gpu",), 0),
    (with_value("runs_per_gpu", 1.5), ("runs_per_gpu",), 1.5),
    (with_value("runs_per_gpu", None), ("runs_per_gpu",), None),
    (with_value("runs_per_gpu", "many"), ("runs_per_gpu",), "many"),
    (with_value("seed", [1]), ("seed",), [1]),
    (with_value("zzz", 1), ("zzz",), 1),
]


@pytest.mark.parametrize(("content", "keys", "value"), BAD_VALUES, ids=lambda part: repr(part)[:40])
def test_a_bad_value_is_named_and_the_suggested_block_is_accepted(
    tmp_path: Path, content: dict[str, Any], keys: tuple[str, ...], value: object
) -> None:
    path = tmp_path / "config.yaml"
    assert f": {value!r}: " in refusal(path, content)
    assert_block_mends(path, content, keys)


def test_configurations_left_out_are_asked_for(tmp_path: Path) -> None:
    content = {key: value for key, value in GOOD.items() if key != "configurations"}
    assert_block_mends(tmp_path / "config.yaml", content, ("configurations",))


BAD_NAMES = [
    *("a/b", "../x", "{x}", "con", "COM1", "nul.txt", "a name with spaces", "no", "1", "true"),
    *(
        "nan",
        "fp32",
        "FP32",
        "bf16",
        "fp16-unscaled",
        "fp32!",
        "",
        "-",
        "_x",
        "é",
        "Ün",
        "a.",
        "x]",
    ),
    *("<script>", "a\nb", "a:b", "x" * 65, "神", "-y-", "default ", "?", "~", "1.5"),
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_bad_name_is_refused_with_one_that_is_accepted(tmp_path: Path, name: str) -> None:
    content = with_value("configurations", name, {})
    plan = assert_block_mends(tmp_path / "config.yaml", content, ("configurations", name))
    assert len(plan.configurations) == 2, "the suggested name must not be taken already"


@pytest.mark.parametrize("name", ["no", "1", "0x10", "1.5", "true", "~", "2020-01-01"])
def test_a_name_that_yaml_reads_as_something_else_is_refused_with_a_better_one(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / "config.yaml"
    text = f"# comment\nconfigurations:\n  {name}: {{}}\ndevice: cpu\n"
    message = refusal(path, text)
    assert "line 3" in message
    assert name in message
    better = re.search(r"(?:such as|write:) (\S+):", message)
    assert better, message
    path.write_text(text.replace(f"{name}:", f"{better[1]}:"), encoding="utf-8")
    assert list(check(path).configurations) == [better[1]]


@pytest.mark.parametrize(
    ("text", "first", "second"),
    [
        ("configurations:\n  a: {}\n  b: {}\n  a: {init_scale: 2}\n", 2, 4),
        ("configurations: {a: {}}\nseeds: [0]\nseeds: [1]\n", 2, 3),
        ("configurations:\n  a:\n    init_scale: 2\n    init_scale: 4\n", 3, 4),
    ],
)
def test_a_repeated_key_is_refused_with_both_lines(
    tmp_path: Path, text: str, first: int, second: int
) -> None:
    message = refusal(tmp_path / "config.yaml", text)
    assert re.search(rf"\bline {first}\b.*\bline {second}\b", message)


def test_a_repeated_configuration_is_refused_with_a_name_that_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    message = refusal(path, "configurations:\n  a: {}\n  a: {init_scale: 2}\ndevice: cpu\n")
    better = re.search(r"such as (\S+):", message)
    assert better, message
    path.write_text(f"configurations:\n  a: {{}}\n  {better[1]}: {{}}\ndevice: cpu\n")
    assert len(check(path).configurations) == 2


@pytest.mark.parametrize("text", ["seeds: [0]\nseeds: [1]\n", "threads: 1\nthreads: 2\n"])
def test_a_repeated_setting_is_not_told_to_take_another_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    message = refusal(path, "configurations: {a: {}}\n" + text)
    assert "-2" not in message.replace(str(path), "")


def test_names_that_differ_only_in_case_are_refused_naming_both(tmp_path: Path) -> None:
    content = with_value("configurations", "Default", {})
    path = tmp_path / "config.yaml"
    message = refusal(path, content)
    assert "'default'" in message or "'Default'" in message
    refused = "Default" if "configurations.Default" in message else "default"
    assert len(assert_block_mends(path, content, ("configurations", refused)).configurations) == 2


@pytest.mark.parametrize(
    ("text", "line", "shown"),
    [
        ("configurations: {a: {}\nseeds: [0]\n", 2, "seeds"),
        ("configurations:\n\ta: {}\n", 2, "a: {}"),
        ("a: 1\nb: [1, 2\nc: }\n", 3, "c: }"),
        ("a: *missing\n", 1, "*missing"),
        ("a: !!python/object/apply:os.getcwd []\n", 1, "python"),
        ("a: 'open\n", 1, "open"),
    ],
)
def test_text_that_is_no_yaml_is_refused_with_its_line(
    tmp_path: Path, text: str, line: int, shown: str
) -> None:
    message = refusal(tmp_path / "config.yaml", text)
    assert f"line {line} " in message
    assert shown in message


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n", "- a\n- b\n", "7\n"])
def test_a_file_without_keys_is_refused_with_what_to_write(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    message = refusal(path, text)
    path.write_text(re.split(r"write at least: |; write: ", message)[1], encoding="utf-8")
    assert list(check(path).configurations) == ["default"]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: .*no such file"):
        read_config(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="folder"):
        read_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("configurations: {é: {}}".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.yaml: .*UTF-8.*byte 17"):
        read_config(tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("init_scale", "1e39"),
        ("init_scale", "4e38"),
        ("init_scale", "1e-50"),
        ("init_scale", "1" + "0" * 400),
        ("growth_interval", "1e20"),
    ],
)
def test_a_number_that_the_scaler_cannot_hold_is_refused(
    tmp_path: Path, key: str, value: str
) -> None:
    text = f"configurations: {{a: {{{key}: {value}}}}}\ndevice: cpu\n"
    message = refusal(tmp_path / "config.yaml", text)
    assert f"configurations.a.{key}: " in message
    # Not "must be greater than 0": it is.
    assert re.search("less than|at most|between|not finite|range of fp32", message)


@pytest.mark.parametrize("value", ["1" + "0" * 5000, "2020-13-45"])
def test_a_value_that_yaml_itself_cannot_read_is_refused(tmp_path: Path, value: str) -> None:
    refusal(tmp_path / "config.yaml", f"configurations: {{a: {{init_scale: {value}}}}}\n")


def test_a_seed_that_no_generator_takes_is_refused(tmp_path: Path) -> None:
    content = with_value("seeds", [2**64])
    assert_block_mends(tmp_path / "config.yaml", content, ("seeds",))


numbers = st.one_of(
    st.floats(), st.integers(), st.sampled_from([10**400, -(10**400), 5e-324, 1e308]), st.booleans()
)
values = st.one_of(numbers, st.text(max_size=20), st.none(), st.lists(st.integers(), max_size=3))
fields = st.sampled_from(list(POLICIES["torch"].parameters()))


@given(
    key=st.one_of(
        fields, st.tuples(fields, st.integers(0, 9)).map(lambda t: t[0][: t[1]] + t[0][t[1] + 1 :])
    ),
    value=values,
)
@example("init_scal", -1)
@example("init_scal", math.nan)
@example("init_scal", True)
@example("growth_factr", 0.5)
def test_whatever_a_parameter_is_set_to_it_is_accepted_or_mended(
    tmp_path: Path, key: str, value: object
) -> None:
    content, keys, _ = scaler(key, value)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    try:
        check(path)
    except ConfigError:
        assert_block_mends(path, content, keys)


names = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=70),
    st.sampled_from(["con", "no", "default", "fp32", "bf16"]).map(lambda name: f"{name}!"),
)


@given(name=names)
def test_whatever_a_configuration_is_called_it_is_accepted_or_mended(
    tmp_path: Path, name: str
) -> None:
    content = with_value("configurations", name, {})
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    try:
        plan = check(path)
    except ConfigError:
        plan = assert_block_mends(path, content, ("configurations", name))
    assert len(plan.configurations) == len({name, "default"})


@pytest.mark.parametrize("name", ["seeds", "steps", "device", "configurations", "init_scale"])
def test_a_configuration_may_be_called_like_a_key(tmp_path: Path, name: str) -> None:
    path = tmp_path / "config.yaml"
    plan = assert_block_mends(path, with_value("configurations", name, 5), ("configurations", name))
    assert set(plan.configurations) == {name, "default"}


@pytest.mark.parametrize("block", [{"init_scal": 2}, {"init_scale": -2}, 5])
@pytest.mark.parametrize("name", ["a]", "a\nb", "\x85", "7"])
def test_a_strange_name_over_a_bad_block_is_refused_on_one_line(
    tmp_path: Path, name: str, block: object
) -> None:
    message = refusal(tmp_path / "config.yaml", with_value("configurations", name, block))
    assert repr(name)[1:-1] in message
