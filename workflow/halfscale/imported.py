"""What a user's own workload depends on: its file and the modules of its own that it imports.

Found by reading the import statements, recursively: modules and packages beside the file, or of the
same installed package. What Python imports in another way is not seen.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path

from halfscale.entry import Entry, find_entry

Names = tuple[str, ...]


def source_files(entry: Entry) -> dict[str, Path]:
    """The files a workload's code consists of, by their names relative to the entry's root."""
    found: dict[str, Path] = {}
    pending = [entry.file]
    if entry.package:
        # Importing a module runs the __init__ of each package around it.
        pending += _resolve(entry, entry.file.relative_to(entry.root).with_suffix("").parts)
    while pending:
        file = pending.pop()
        name = file.relative_to(entry.root).as_posix()
        if name not in found:
            found[name] = file
            for names in _imports(file, file.relative_to(entry.root).parent.parts):
                pending += _resolve(entry, names)
    return found


def entry_digest(entry: Entry) -> str:
    """SHA-256 (first 16 hex digits) over the names and bytes of `source_files`.

    Raises:
        OSError: If a file cannot be read.
    """
    digest = hashlib.sha256()
    for name, file in sorted(source_files(entry).items()):
        digest.update(name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def stop_if_edited(entry: str, source: str) -> None:
    """Refuse to train with other code than the plan was made for.

    Args:
        entry: The entry of a run's specification.
        source: Its source digest, which ends with the digest of the entry's files.

    Raises:
        RuntimeError: If a file of the entry was edited since.
        EntryError: If its file is gone.
    """
    if not source.endswith(entry_digest(find_entry(entry))):
        raise RuntimeError(
            f"{entry} or a module it imports was edited after this run was planned; "
            "run the same command again"
        )


def _imports(file: Path, package: Names) -> Iterator[Names]:
    """The dotted names that a file imports, each as far as it could be a module."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return  # The run itself will say so.
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level <= len(package) + 1:
            above = package[: len(package) + 1 - node.level] if node.level else ()
            module = (*above, *(node.module.split(".") if node.module else ()))
            yield module
            yield from ((*module, alias.name) for alias in node.names)


def _resolve(entry: Entry, names: Names) -> Iterator[Path]:
    """The files below the root that an import of a dotted name runs, outermost first."""
    if not names or names[0] == "halfscale" or (entry.package and names[0] != entry.package):
        return
    for end in range(1, len(names) + 1):
        base = entry.root.joinpath(*names[:end])
        module = base.with_name(f"{base.name}.py")
        if (base / "__init__.py").is_file():
            yield base / "__init__.py"
        elif module.is_file():
            yield module
            return
        elif not base.is_dir():
            return
