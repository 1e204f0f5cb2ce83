"""Budgets of the code base: what keeps it small enough to be read."""

import ast
import inspect
import re
import subprocess
from pathlib import Path

import pytest

import adatom
import adatom.compat.flash_attn
import adatom.nn

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "adatom"
SOURCES = sorted(PACKAGE.rglob("*.py"))
CODE = [*SOURCES, *sorted((ROOT / "tests").glob("*.py")), *sorted((ROOT / "examples").glob("*.py"))]
TOOLS = {"doctor", "verify", "compile", "demo", "cli", "evidence", "records"}
TEXT = (".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".svg", ".html", "")


def is_kernel(path):
    """Files of device code: triton_*.py, hopper_*.py, tiles/."""
    return path.name.startswith(("triton_", "hopper_")) or path.parent.name == "tiles"


def name(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", CODE, ids=name)
def test_a_file_has_at_most_600_lines(path):
    assert len(path.read_text().splitlines()) <= 600


def test_modules_that_the_type_checker_leaves_out_exist():
    named = re.findall(r'^    "(adatom\.[a-z_.]+)",$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert len(named) > 40
    assert [module for module in named if not (ROOT / f"{module.replace('.', '/')}.py").exists()] == []


def lines_of_code(path):
    """Lines that hold code: neither empty, nor comments, nor docstrings."""
    text = path.read_text()
    skipped = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            skipped.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    numbered = enumerate((line.strip() for line in text.splitlines()), 1)
    return sum(1 for n, line in numbered if line and not line.startswith("#") and n not in skipped)


def test_the_package_is_small():
    """Lines of code outside kernels: 2,820 for attention, 970 for any other op, 1,850 for what is around them; and
    3,580 for the tools of the command line, which no training job runs."""
    tools = [path for path in SOURCES if path.stem in TOOLS or path.parent.name == "bench"]
    assert {path.stem for path in tools} >= TOOLS
    assert sum(map(lines_of_code, tools)) <= 3580
    ops = {path.name: 0 for path in (PACKAGE / "ops").iterdir() if path.is_dir() and path.name != "__pycache__"}
    around = 0
    for path in SOURCES:
        if is_kernel(path) or path in tools:
            continue
        if path.parent.name in ops:
            ops[path.parent.name] += lines_of_code(path)
        else:
            around += lines_of_code(path)
    assert ops.pop("attention") <= 2820 and max(ops.values()) <= 970
    assert around <= 1850


def public_functions():
    """Every function that users call, and every public method of classes, by name."""
    for module in (adatom, adatom.nn, adatom.compat.flash_attn):
        for member in vars(module).values():
            if not getattr(member, "__module__", "").startswith("adatom") or member.__name__.startswith("_"):
                continue
            if inspect.isclass(member):
                for name, method in vars(member).items():
                    if inspect.isfunction(method) and not name.startswith("_"):
                        yield f"{member.__name__}.{name}", method
            else:
                yield member.__name__, member


def test_public_functions_have_at_most_14_arguments():
    """But for two whose signatures are flash-attn's."""
    counts = {name: len(inspect.signature(function).parameters) for name, function in public_functions()}
    assert counts["attention"] > 10
    assert {name for name, n in counts.items() if n > 14} <= {"flash_attn_varlen_func", "flash_attn_with_kvcache"}


def test_one_environment_variable_of_our_own():
    variables = set()
    for path in SOURCES:
        variables |= set(re.findall(r"\bADATOM_[A-Z_]+\b", path.read_text()))
    assert variables == {"ADATOM_LOG"}


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_only_kernel_files_import_triton(path):
    """`import adatom` must work, and be quick, without Triton."""
    imported = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert "triton" not in imported or is_kernel(path)


def test_files_speak_of_no_machine():
    """No absolute paths of somebody's machine, and no names of hosts inside a network."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split(
        "\n"
    )
    paths = [ROOT / file for file in listed if file] or [p for p in ROOT.rglob("*") if p.is_file()]
    forbidden = re.compile(
        r"(?<![\w.])/(home|root|Users|work|mnt|opt|tmp|private|scratch|data)/\w|file:///|\.internal\b|\.local\b"
    )
    found = []
    for path in paths:
        if path == Path(__file__) or path.suffix not in TEXT or not path.exists():
            continue
        for number, line in enumerate(path.read_text(errors="ignore").splitlines(), 1):
            if match := forbidden.search(line):
                found.append(f"{name(path)}:{number}: {match.group()}")
    assert not found, "\n".join(found)


def test_there_is_no_utils_file():
    assert not [path for path in SOURCES if path.stem in ("utils", "util", "helpers", "misc", "common")]


def test_ci_installs_what_tests_would_skip_without():
    """A test that asks for a package runs somewhere."""
    asked = (re.findall(r"importorskip\(\"(\w+)", path.read_text()) for path in CODE if path.parent.name == "tests")
    extras = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    assert {package for some in asked for package in some} - {"adatom"} <= set(re.findall(r'"(\w+)>=', extras))


def _products(body: list[ast.stmt]) -> bool:
    called = (ast.unparse(n.func) for line in body for n in ast.walk(line) if isinstance(n, ast.Call))
    return any("mma" in name and "wait" not in name or "multiply" in name for name in called)


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("ops/**/hopper_*.py")), ids=lambda path: path.stem)
def test_no_two_branches_multiply(path):
    """ptxas may describe an operand in one of two branches that both multiply by it ("What the compiler does behind
    one's back", docs/hopper.md). A condition of constants is no branch."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.If) and _products(node.body) and _products(node.orelse):
            names = [n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)]
            assert all(name.isupper() for name in names), f"{path.name}:{node.lineno}"
