"""The notebook is executed by this interpreter, privately, and becomes one quiet page."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from halfscale.report import ReportError, execute_notebook, render_page
from halfscale.sources import NOTEBOOK


def write_notebook(path: Path, sources: Sequence[str]) -> Path:
    parameters = new_code_cell("word = 'default'")
    parameters.metadata["tags"] = ["parameters"]
    cells = [parameters, *(new_code_cell(source) for source in sources)]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)
    return path


def printed(executed: Path) -> list[str]:
    notebook = nbformat.read(executed, as_version=4)
    return [
        output["text"] for cell in notebook.cells for output in cell.get("outputs", ())
        if output["output_type"] == "stream"
    ]  # fmt: skip


@pytest.fixture
def decoy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty HOME but for a kernel named python3 that ends at once."""
    home = tmp_path / "home"
    kernel = home / ".local" / "share" / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    specification = {"argv": ["/bin/false"], "display_name": "Decoy", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(specification))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("JUPYTER_DATA_DIR", raising=False)
    monkeypatch.setenv("JUPYTER_PATH", str(kernel.parents[1]))
    return home


@pytest.mark.usefixtures("decoy")
def test_the_kernel_is_this_interpreter_and_talks_over_private_sockets(
    tmp_path: Path, awkward: Path
) -> None:
    questions = [
        "import json, os, sys",
        "from ipykernel.connect import get_connection_file",
        "connection = json.load(open(get_connection_file()))",
        "folder = os.path.dirname(connection['ip'])",
        "print(word)",
        "print(sys.executable)",
        "print(connection['transport'])",
        "print(oct(os.stat(folder).st_mode & 0o777))",
        "print(oct(os.stat(get_connection_file()).st_mode & 0o077))",
        "print(folder)",
    ]
    notebook = write_notebook(awkward / "in.ipynb", ["\n".join(questions)])
    executed, attempt = awkward / "out.ipynb", awkward / "logs" / "attempt.ipynb"
    before = dict(os.environ)
    execute_notebook(notebook, executed, attempt, {"word": 'it\'s "given"'})
    word, interpreter, transport, mode, others, folder = "".join(printed(executed)).splitlines()
    assert word == 'it\'s "given"'
    assert interpreter == sys.executable
    assert (transport, mode, others) == ("ipc", "0o700", "0o0")
    assert not Path(folder).exists(), "the private folder must not stay"
    assert not attempt.exists(), "an attempt that succeeded is not kept"
    assert dict(os.environ) == before


@pytest.mark.usefixtures("decoy")
def test_a_cell_that_fails_keeps_the_executed_part_and_leaves_no_stale_result(
    tmp_path: Path,
) -> None:
    notebook = write_notebook(tmp_path / "in.ipynb", ["print('before')", "1/0", "print('after')"])
    executed, attempt = tmp_path / "out.ipynb", tmp_path / "logs" / "attempt.ipynb"
    executed.write_text("stale")
    with pytest.raises(ReportError, match="ZeroDivisionError") as caught:
        execute_notebook(notebook, executed, attempt, {})
    assert str(attempt) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert not executed.exists()
    kept = printed(attempt)
    assert "before\n" in kept
    assert "after\n" not in kept
    assert "ZeroDivisionError" in attempt.read_text()


def test_a_file_named_like_a_module_in_the_working_folder_is_not_imported(
    tmp_path: Path, decoy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # HOME is read-only as well: everything that is written goes to a private folder.
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong module')")
    monkeypatch.chdir(tmp_path)
    files = sorted(decoy.rglob("*"))
    decoy.chmod(0o500)
    notebook = write_notebook(tmp_path / "in.ipynb", ["import json; print(json.dumps(1))"])
    execute_notebook(notebook, tmp_path / "out.ipynb", tmp_path / "attempt.ipynb", {})
    decoy.chmod(0o700)
    assert printed(tmp_path / "out.ipynb") == ["1\n"]
    assert sorted(decoy.rglob("*")) == files


@pytest.fixture
def executed(tmp_path: Path) -> Path:
    """An executed notebook: a heading, hidden code, an HTML output, text on standard output."""
    cell = new_code_cell("secret_code = 1", execution_count=3)
    html = {"text/html": '<p class="answer">Train <b>so</b>.</p>', "text/plain": "<HTML object>"}
    cell.outputs = [nbformat.v4.new_output("display_data", data=html)]
    notebook = new_notebook(cells=[new_markdown_cell("# A title\n\nWords."), cell])
    nbformat.write(notebook, tmp_path / "executed.ipynb")
    return tmp_path / "executed.ipynb"


def test_a_page_is_one_file_without_code_scripts_or_other_hosts(
    executed: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    render_page(executed, page, title="A page")
    text = page.read_text("utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert "<title>A page</title>" in text
    assert '<p class="answer">Train <b>so</b>.</p>' in text
    assert "A title</h1>" in text
    for absent in ("secret_code", "<script", "http://", "https://", "[3]", "&lt;HTML object"):
        assert absent not in text, absent
    assert "default-src 'none'" in text
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".html"] == ["page.html"]


def test_a_page_that_cannot_be_made_leaves_no_stale_one(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("stale")
    (tmp_path / "broken.ipynb").write_text("{")
    with pytest.raises(Exception):  # noqa: B017 - whatever nbformat raises
        render_page(tmp_path / "broken.ipynb", page)
    assert not page.exists()


def test_the_notebook_is_kept_without_outputs_and_its_cells_are_thin() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert max(len(cell.source.splitlines()) for cell in code) <= 5
    assert [cell.metadata.get("tags") for cell in code if cell.metadata.get("tags")] == [
        ["parameters"]
    ]
