"""Execute the report notebook and turn it into one self-contained page."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import papermill
from jinja2 import Environment
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbconvert import HTMLExporter
from papermill.exceptions import PapermillExecutionError

from halfscale.records import write_atomically, write_text

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{{ title }}</title>
<style>{{ style }}</style>
</head>
<body><main>
{{ body }}
</main></body>
</html>
"""

_STYLE = """
:root { color-scheme: light; --ink: #22262b; --soft: #59616a; --line: #d9dde2; --good: #0b6b4f; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 64rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.05rem; font-weight: 600; color: var(--soft); margin: 0; }
h2 { font-size: 1.3rem; margin: 2.6rem 0 .6rem; }
p { max-width: 46rem; }
.answer { font-size: 1.7rem; line-height: 1.3; font-weight: 650; margin: .6rem 0 1rem;
  max-width: 52rem; border-left: .35rem solid var(--good); padding-left: 1rem; }
.answer.no-winner { border-color: #8a1c1c; }
.answer.no-measurable-difference, .answer.single { border-color: #b77a00; }
pre.paste { background: #f4f6f8; border: 1px solid var(--line); border-radius: .4rem;
  padding: .8rem 1rem; overflow-x: auto; font-size: .95rem; }
code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; }
.evidence, .note, figcaption, details { color: var(--soft); }
.note { font-size: .92rem; }
figure { margin: 1rem 0 1.5rem; }
figure img { width: 100%; height: auto; }
figcaption { font-size: .95rem; }
details { font-size: .92rem; margin: .4rem 0; }
summary { cursor: pointer; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; margin: .6rem 0; }
th { text-align: left; border-bottom: 2px solid var(--ink); padding: .3rem .7rem .3rem 0;
  vertical-align: bottom; font-weight: 600; }
td { border-bottom: 1px solid var(--line); padding: .3rem .7rem .3rem 0; vertical-align: top; }
td:not(.long) { white-space: nowrap; }
td.number { font-variant-numeric: tabular-nums; text-align: right; }
dt { font-family: ui-monospace, "DejaVu Sans Mono", monospace; margin-top: .4rem; }
dd { margin-left: 1.5rem; }
a.anchor-link { display: none; }
@media (max-width: 40rem) { .answer { font-size: 1.3rem; } }
"""


class ReportError(RuntimeError):
    """The notebook failed; the message says where its executed part is kept."""


class _PrivateKernelManager(AsyncKernelManager):
    """Start this very interpreter as the kernel and talk to it over sockets in a private folder.

    No kernelspec is looked up, so one installed elsewhere under the same name cannot take over,
    and no port is opened on the machine.
    """

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.transport = "ipc"
        self.ip = str(Path(os.environ["JUPYTER_RUNTIME_DIR"], "kernel"))

    @property
    def kernel_spec(self) -> KernelSpec:
        # -P keeps a file named like a module in the working folder from being imported.
        arguments = [sys.executable, "-P", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=arguments, display_name="halfscale", language="python")


@contextmanager
def _private_folders() -> Iterator[None]:
    """Keep everything Jupyter, IPython and matplotlib write out of HOME, which may be read-only."""
    # The path of a socket may have about 100 characters: /tmp, whatever TMPDIR says.
    parent = "/tmp" if os.access("/tmp", os.W_OK) else None  # noqa: S108 - mkdtemp makes it private
    folder = tempfile.mkdtemp(prefix="halfscale-", dir=parent)
    names = (
        "JUPYTER_RUNTIME_DIR",
        "JUPYTER_CONFIG_DIR",
        "JUPYTER_DATA_DIR",
        "IPYTHONDIR",
        "MPLCONFIGDIR",
    )
    before = {name: os.environ.get(name) for name in names}
    try:
        for name in names:
            # The runtime folder is the parent itself, to keep the sockets' paths short.
            own = Path(folder, "" if name == "JUPYTER_RUNTIME_DIR" else name.lower())
            own.mkdir(exist_ok=True)
            os.environ[name] = str(own)
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)


def execute_notebook(
    notebook: Path, executed: Path, attempt: Path, parameters: dict[str, str]
) -> None:
    """Execute a notebook with papermill, in this interpreter, and put the result in place.

    Args:
        notebook: The notebook without outputs.
        executed: Where the executed notebook goes if every cell succeeded.
        attempt: Where it is written while it runs, and left if a cell fails.
        parameters: Values for its parameters cell.

    Raises:
        ReportError: If a cell fails; nothing is then at ``executed``.
    """
    executed.unlink(missing_ok=True)
    attempt.parent.mkdir(parents=True, exist_ok=True)
    with _private_folders():
        try:
            papermill.execute_notebook(
                str(notebook),
                str(attempt),
                parameters=parameters,
                kernel_name="halfscale",
                language="python",
                kernel_manager_class=_PrivateKernelManager,
                progress_bar=False,
            )
        except PapermillExecutionError as error:
            raise ReportError(
                f"cell {error.cell_index} of the report failed: {error.ename}: {error.evalue}; "
                f"the executed part is kept in {attempt}"
            ) from error
    write_atomically(executed, lambda path: shutil.copyfile(attempt, path))
    attempt.unlink()


def render_page(executed: Path, page: Path, title: str = "halfscale: which loss scaling?") -> None:
    """Turn an executed notebook into one HTML file that asks no other host for anything.

    Code is hidden. The page has no script, and its content security policy allows none.
    """
    page.unlink(missing_ok=True)
    notebook = nbformat.read(executed, as_version=4)
    exporter = HTMLExporter(
        template_name="basic",
        exclude_input=True,
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        exclude_anchor_links=True,
    )
    body, _ = exporter.from_notebook_node(notebook)
    template = Environment(autoescape=False).from_string(_PAGE)  # noqa: S701 - parts are escaped
    write_text(page, template.render(title=title, style=_STYLE, body=body))
