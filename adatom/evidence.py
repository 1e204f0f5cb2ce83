"""What was proven where: the hash of each kernel's code, and the records that `adatom verify --record` writes.

The hash covers the syntax tree of the kernel's file and of the device code it imports, of `tiles` the definitions that
it uses, without docstrings: comments and formatting do not count, a changed tile size does. Nothing is imported to
compute it, so no GPU, torch or Triton is needed.
"""

from __future__ import annotations

import ast
import hashlib
import json
from functools import lru_cache
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


def digest(source: str | list[ast.stmt], more: Any = ()) -> str:
    """sha256 of Python source, blind to comments, formatting and docstrings; and of what there is more."""
    tree = ast.parse(source) if isinstance(source, str) else ast.Module(source, [])
    return hashlib.sha256(json.dumps([_canonical(tree), *more]).encode()).hexdigest()


def _bound(node: ast.stmt) -> list[str]:
    """The names that a statement of a module binds, if it does nothing else; [] for one that may have other effects."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [t.id for t in targets if isinstance(t, ast.Name)] if all(isinstance(t, ast.Name) for t in targets) else []


class _Module:
    """A file of the package: its statements, and what its names stand for."""

    def __init__(self, source: str, package: Path) -> None:
        self.body = ast.parse(source).body
        self.known: dict[str, list[int]] = {}  # numbers of the statements that bind a name
        self.imported: dict[str, tuple[str, str]] = {}  # (module, name in it, or "" for all of it)
        for i, node in enumerate(self.body):
            for name in _bound(node):
                self.known.setdefault(name, []).append(i)
        for part in ast.walk(ast.Module(self.body, [])):
            if isinstance(part, ast.Import):
                self.imported |= {a.asname or a.name.split(".")[0]: (a.name, "") for a in part.names}
            elif isinstance(part, ast.ImportFrom) and part.module:
                for a in part.names:
                    whole = _file(f"{part.module}.{a.name}", package) is not None
                    found = (f"{part.module}.{a.name}", "") if whole else (part.module, a.name)
                    self.imported[a.asname or a.name] = found

    def part(self, names: set[str]) -> tuple[list[ast.stmt], set[str]]:
        """The statements that make the names, or might do more than bind one; and the imported names that these use."""
        todo, taken, used = set(names), set[int](), set[str]()
        for i, node in enumerate(self.body):
            if not _bound(node) and not isinstance(node, (ast.Import, ast.ImportFrom)):
                taken.add(i)
                todo |= _names(node)
        done = set[str]()
        while todo:
            name = todo.pop()
            done.add(name)
            if name in self.imported:
                used.add(name)
            for i in self.known.get(name, ()):
                taken.add(i)
                todo |= _names(self.body[i]) - done
        return [self.body[i] for i in sorted(taken)], used


@lru_cache(maxsize=256)
def _module(source: str, package: Path) -> _Module:
    return _Module(source, package)


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _file(name: str, package: Path) -> Path | None:
    """The file of device code that a module of that name is, if it is one."""
    top, *parts = name.split(".")
    file = package.joinpath(*parts).with_suffix(".py")
    device = parts[:1] == ["tiles"] or parts and parts[-1].startswith(_DEVICE)
    return file if top == package.name and device and file.is_file() else None


def code(target: str, package: Path = PACKAGE) -> dict[Path, str]:
    """Digests of the device code behind `module:function`: the kernel's file and what it imports, directly or not;
    of files in `tiles` what is used of them."""
    wanted: dict[Path, set[str] | None] = {}  # None: all
    todo: list[tuple[Path, str]] = [(package / "ops" / (target.split(":")[0].replace(".", "/") + ".py"), "")]
    found: dict[Path, str] = {}
    while todo:
        path, name = todo.pop()
        before = wanted.get(path, set())
        if before is None or name in before:
            continue
        of = _module(path.read_text(), package)
        if not name or path.parent != package / "tiles":
            wanted[path], used = None, set(of.imported)
            found[path] = digest(of.body)
        else:
            wanted[path] = names = before | {name}
            body, used = of.part(names)
            found[path] = digest(body, [[one, *of.imported[one]] for one in sorted(used)])
        for one in used:
            module, inside = of.imported[one]
            if (file := _file(module, package)) is not None:
                todo.append((file, inside))
    return {path: found[path] for path in sorted(found)}


def code_hash(target: str, package: Path = PACKAGE) -> str:
    """The hash of the code behind a row's `module:function`."""
    parts = [f"{path.relative_to(package).as_posix()} {found}" for path, found in code(target, package).items()]
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
