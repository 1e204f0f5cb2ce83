"""No GPU kernel without proof: its current code must have passed `adatom verify --record` on some GPU."""

from pathlib import Path

import pytest

from adatom import evidence, registry

KERNEL = '''
"""A kernel."""
import torch
from adatom.tiles.softmax import step
from adatom.ops.op.triton_call import launch
from adatom.ops.op.problem import Inputs

CONFIGS = {90: (128, 64)}

def forward(x):
    """Returns y."""
    return step(x, None)
'''

SOFTMAX = """
from adatom.tiles.scores import masked as hidden
from adatom.tiles.other import unused
import torch

SCALE = 1
OTHER = 2

def step(x):
    return inner(x) * SCALE

def inner(x):
    return hidden(x)

def more(x):
    return unused(x)

if OTHER:
    torch.patched = True
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    root = tmp_path / "adatom"
    (root / "ops" / "op").mkdir(parents=True)
    (root / "tiles").mkdir()
    (root / "ops" / "op" / "triton_fwd.py").write_text(KERNEL)
    (root / "ops" / "op" / "triton_call.py").write_text("from adatom.tiles import launch\n")
    (root / "ops" / "op" / "problem.py").write_text("Inputs = 1\n")
    (root / "tiles" / "softmax.py").write_text(SOFTMAX)
    (root / "tiles" / "launch.py").write_text("launch = 1\n")
    (root / "tiles" / "other.py").write_text("unused = 1\n")
    (root / "tiles" / "scores.py").write_text("masked = 1\nrest = 1\n")
    return root


def changed(package: Path, file: str, text: str) -> bool:
    before = evidence.code_hash("op.triton_fwd:forward", package)
    (package / file).write_text(text)
    return evidence.code_hash("op.triton_fwd:forward", package) != before


@pytest.mark.parametrize(
    "text",
    [
        "# a comment\n" + KERNEL,
        KERNEL.replace("A kernel.", "The kernel, documented."),
        KERNEL.replace('"""Returns y."""', "# bare"),
        KERNEL.replace("step(x, None)", "step(\n        x, None,\n    )"),
    ],
    ids=["comment", "docstring", "no docstring", "formatting"],
)
def test_hash_is_blind_to_what_does_not_run(package, text):
    assert not changed(package, "ops/op/triton_fwd.py", text)


@pytest.mark.parametrize(
    "file, text",
    [
        ("ops/op/triton_fwd.py", KERNEL.replace("step(x, None)", "step(x, 0)")),
        ("ops/op/triton_fwd.py", KERNEL.replace("(128, 64)", "(128, 128)")),
        ("ops/op/triton_fwd.py", KERNEL.replace("(x)", "(y)", 1)),
        ("tiles/softmax.py", SOFTMAX.replace("inner(x) *", "inner(x) +")),
        ("tiles/softmax.py", SOFTMAX.replace("SCALE = 1", "SCALE = 3")),
        ("tiles/softmax.py", SOFTMAX.replace("return hidden(x)", "return hidden(x, 1)")),
        ("tiles/softmax.py", SOFTMAX.replace("OTHER = 2", "OTHER = 0")),
        ("tiles/softmax.py", SOFTMAX.replace("patched = True", "patched = False")),
        ("tiles/softmax.py", SOFTMAX + "\nSCALE += 1\n"),
        ("tiles/softmax.py", SOFTMAX + "\ndef step(x):\n    return x\n"),
        ("tiles/softmax.py", SOFTMAX.replace("import masked as", "import rest as")),
        ("tiles/scores.py", "masked = 2\nrest = 1\n"),
        ("ops/op/triton_call.py", "from adatom.tiles import launch\nflag = True\n"),
        ("tiles/launch.py", "launch = 2\n"),
    ],
)
def test_hash_sees_code(package, file, text):
    assert changed(package, file, text)


def test_hash_leaves_out_what_the_kernel_does_not_use(package):
    assert not changed(package, "tiles/other.py", "unused = 2\n")
    assert not changed(package, "tiles/scores.py", "masked = 1\nrest = 2\n")
    assert not changed(package, "tiles/softmax.py", SOFTMAX.replace("unused(x)", "unused(x, x)"))
    assert not changed(package, "tiles/softmax.py", SOFTMAX + "\nADDED = 1\n")
    assert not changed(package, "ops/op/problem.py", "Inputs = 2\n")


def test_none_differs_from_no_value():
    assert evidence.digest("return_ = None") != evidence.digest("return_ = 0")
    assert evidence.digest("def f(): return None") != evidence.digest("def f(): return")


def test_every_row_has_a_hash():
    for row in registry.ROWS:
        assert len(evidence.code_hash(row.target)) == 64


def test_record_round_trip_and_failures_prove_nothing(tmp_path):
    row = registry.ROWS[0]
    now = evidence.code_hash(row.target)
    good = evidence.Proof(row.op, row.backend, now, 3, 0.5, "case", "out")
    for proof, names in (
        (good, ["gpu.json"]),
        (good._replace(worst=1.5), []),
        (good._replace(worst=float("inf")), []),
        (good._replace(worst=float("nan")), []),
        (good._replace(cases=0), []),
        (good._replace(hash="0" * 64), []),
        (good._replace(backend="other"), []),
    ):
        evidence.write(tmp_path / "gpu.json", {"gpu": "a GPU"}, [proof])
        records = evidence.read(tmp_path)
        assert evidence.proven(row.op, row.backend, row.target, records) == names


def test_new_proofs_leave_those_of_other_rows(tmp_path):
    machine = {"gpu": "a GPU", "versions": {"torch": "2"}, "commit": "abc"}
    proofs = [evidence.Proof("norm_fwd", backend, "0" * 64, 3, 0.5, "case", "y") for backend in ("one", "two")]
    path = tmp_path / "gpu.json"
    assert evidence.beside(path, machine, set()) == []
    evidence.write(path, machine, proofs)
    assert evidence.beside(path, machine, {("norm_fwd", "one")}) == [proofs[1]._replace(commit="abc")]
    with pytest.raises(ValueError, match="name another file"):
        evidence.beside(path, machine | {"gpu": "another"}, {("norm_fwd", "one")})
    for other in ("", "[]", "{}", '{"commit": null, "rows": [{"op": "norm_fwd", "backend": "two"}]}'):
        path.write_text(other)
        with pytest.raises(ValueError, match="is no evidence"):
            evidence.beside(path, machine, {("norm_fwd", "one")})


@pytest.mark.parametrize(
    "row", [r for r in registry.ROWS if evidence.on_gpu(r.target)], ids=lambda r: f"{r.op}-{r.backend}"
)
def test_every_gpu_kernel_is_proven(row):
    records = evidence.read()
    if not records:
        pytest.skip("evidence/ is empty: run `adatom verify --record evidence/<gpu>.json` on a GPU")
    assert evidence.proven(row.op, row.backend, row.target, records), (
        f"{row.op} {row.backend}: the code of {row.target} has changed since it was last verified on a GPU; "
        "run `adatom verify --record evidence/<gpu>.json` on one"
    )
