"""What imports what: checking a configuration and reading results must not wait for torch."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from halfscale.sources import PACKAGE

FAST = [
    *("config", "devices", "sources", "plan", "naming", "entry", "imported", "workload_plan"),
    *("grid", "search_plan", "planner", "proposals", "packing", "jobs", "outdated", "guard"),
    *("cluster", "policies"),
    *("single", "wording", "quick", "gpus", "warm.client", "warm.keeper"),
]
READING = (
    *("verdict", "style", "tables", "plots", "export", "settings", "fragments", "report"),
    *("simulate", "probe_tables", "probe_plots", "evidence", "search_fragments", "html"),
    *("calibration", "replay_plots", "replay_fragments", "drawn", "svg"),
)
TORCH_FREE = [
    *(*FAST, "records", "magnitudes", "gpu_use", *READING),
    *("replay", "replay_seal", "search", "predict", "probe_files", "candidates", "replaying"),
    *("logs", "cli"),
]
FACE = ("cli", "quick", "warm", "warm.client", "warm.keeper")
GROUND = (
    *(set(FAST) - set(FACE)),
    *("records", "magnitudes", "gpu_use", "probe_files", "replay_seal"),
)
PARTS = ("scaling", "precision", "workloads", "own")
DOING = (
    *("train", "steps", "verify", "faults", "machine", "tryout", "probe", "batches", "replay"),
    *("search", "predict", "probing", "candidates", "replaying", "logs"),
)


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """The heavy modules that are loaded after each import, in one fresh interpreter."""
    program = (
        "import sys, importlib\n"
        f"sys.path.insert(0, {str(PACKAGE.parent)!r})\n"
        f"for name in {TORCH_FREE!r}:\n"
        "    importlib.import_module('halfscale.' + name)\n"
        "    heavy = {'torch', 'pandas', 'numpy', 'scipy', 'matplotlib', 'sklearn'}\n"
        "    print(name, *sorted(heavy & set(sys.modules)))\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    return {words[0]: set(words[1:]) for words in map(str.split, output.splitlines())}


@pytest.mark.parametrize("module", TORCH_FREE)
def test_reading_never_imports_torch(loaded: dict[str, set[str]], module: str) -> None:
    assert "torch" not in loaded[module]


@pytest.mark.parametrize("module", FAST)
def test_parsing_the_workflow_imports_nothing_heavy(
    loaded: dict[str, set[str]], module: str
) -> None:
    assert loaded[module] == set()


def imported(module: str) -> set[str]:
    """The package's own modules that a module, or a package of it, names in an import."""
    file = PACKAGE / f"{module}.py"
    files = [file] if file.exists() else sorted((PACKAGE / module).glob("*.py"))
    found = set()
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("halfscale."):
            found.add(str(node.module).split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {
                alias.name.split(".")[1]
                for alias in node.names
                if alias.name.startswith("halfscale.")
            }
    return found - {module}


@pytest.mark.parametrize(
    ("layer", "allowed"),
    [
        (GROUND, GROUND),
        (PARTS, (*PARTS, *GROUND)),
        (DOING, (*DOING, *PARTS, *GROUND)),
        (READING, (*READING, *GROUND)),
    ],
    ids=["ground", "parts", "doing", "reading"],
)
def test_imports_run_one_way(layer: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    for module in layer:
        assert imported(module) <= set(allowed), module


def test_every_module_belongs_to_a_layer() -> None:
    modules = {
        path.stem if path.suffix else path.name
        for path in PACKAGE.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    lower = {*GROUND, *PARTS, *DOING, *READING}
    assert modules - {"__init__", "__main__", *FACE} == lower
