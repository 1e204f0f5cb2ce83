"""What was proven where: the hash of each kernel's code, and the records that `adatom verify --record` writes.

The hash covers the syntax tree of the kernel's file and of the device code it imports, without docstrings: comments and
formatting do not count, a changed tile size does. Nothing is imported to compute it, so no GPU, torch or Triton is
needed.
"""

from __future__ import annotations

import ast
import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = Path(__file__).parent
DIRECTORY = PACKAGE.parent / "evidence"
_DEVICE = ("triton", "hopper")  # files whose names begin so hold device code or launch it


class Proof(NamedTuple):
    """One row of a pass that was held against float64: over how many cases, the worst ratio of its error to the allowed
    one with the case and output it occurred in, and the hash of the code that ran. note: what is to be known beside, as
    that `worst` is but a bound."""

    op: str
    backend: str
    hash: str
    cases: int
    worst: float
    case: str
    output: str
    commit: str = ""  # of the code, where it is not the record's
    note: str = ""


def _canonical(node: Any) -> Any:
    """The tree as nested lists, the same under every supported Python: empty fields and docstrings left out."""
    if isinstance(node, ast.AST):
        fields = []
        for name, value in ast.iter_fields(node):
            if name == "body" and isinstance(node, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                value = value[1:] if ast.get_docstring(node, clean=False) is not None else value
            if value not in (None, []) or isinstance(node, ast.Constant) and name == "value":
                fields.append([name, _canonical(value)])
        return [type(node).__name__, *fields]
    return [_canonical(item) for item in node] if isinstance(node, list) else repr(node)


def digest(source: str) -> str:
    """sha256 of Python source, blind to comments, formatting and docstrings."""
    return hashlib.sha256(json.dumps(_canonical(ast.parse(source))).encode()).hexdigest()


def _imports(source: str) -> list[str]:
    """Names of the modules, or of what may be modules, that the source imports absolutely."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def files(target: str, package: Path = PACKAGE) -> list[Path]:
    """The kernel file of `module:function`, and the device code of the package it imports, directly or not."""
    todo = [package / "ops" / (target.split(":")[0].replace(".", "/") + ".py")]
    found: list[Path] = []
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found.append(path)
        for name in _imports(path.read_text()):
            top, *parts = name.split(".")
            file = package.joinpath(*parts).with_suffix(".py")
            device = parts[:1] == ["tiles"] or parts and parts[-1].startswith(_DEVICE)
            if top == package.name and device and file.is_file():
                todo.append(file)
    return sorted(found)


def code_hash(target: str, package: Path = PACKAGE) -> str:
    """The hash of the code behind a row's `module:function`."""
    parts = [f"{path.relative_to(package).as_posix()} {digest(path.read_text())}" for path in files(target, package)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def on_gpu(target: str) -> bool:
    """Whether `module:function` is a GPU kernel: it lies in a file of device code."""
    return target.split(":")[0].rsplit(".", 1)[-1].startswith(_DEVICE)


def beside(path: Path, machine: dict[str, Any], judged: set[tuple[str, str]]) -> list[Proof]:
    """The proofs of a record that new ones of the rows `judged`, (pass, backend), leave standing: those of other rows.
    ValueError if the record is of another GPU or other versions than `machine`, or none."""
    if not path.exists():
        return []
    try:
        record = json.loads(path.read_text())
        of = {"commit": record["commit"] or ""}
        kept = [Proof(**(of | row)) for row in record["rows"] if (row["op"], row["backend"]) not in judged]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is no evidence; name another file") from None
    for what in ("gpu", "versions"):
        if kept and record[what] != machine[what]:
            raise ValueError(f"{path} is of {what} {record[what]}, this is {machine[what]}; name another file")
    return kept


def write(path: Path, machine: dict[str, Any], proofs: list[Proof]) -> None:
    """Write one machine's record: `machine` (names, versions, commit, date, verdict) and a line for each proof."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {n: value for n, value in proof._asdict().items() if value or n not in ("commit", "note")} for proof in proofs
    ]
    record = {**machine, "rows": rows}
    path.write_text(json.dumps(record, indent=2) + "\n")


def read(directory: Path = DIRECTORY) -> dict[str, list[Proof]]:
    """The proofs of every record in a directory, by file name."""
    return {
        path.name: [Proof(**row) for row in json.loads(path.read_text())["rows"]]
        for path in sorted(directory.glob("*.json"))
    }


def proven(op: str, backend: str, target: str, records: dict[str, list[Proof]]) -> list[str]:
    """The records in which this row passed with the code it has now."""
    now = code_hash(target)
    return [
        name
        for name, proofs in records.items()
        if any((p.op, p.backend, p.hash) == (op, backend, now) and p.cases and p.worst <= 1 for p in proofs)
    ]
