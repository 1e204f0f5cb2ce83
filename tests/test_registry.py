"""Which kernel runs: for invented machines, as pure functions of a Problem."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import adatom
from adatom import evidence, registry
from adatom.device import CPU, INTERPRETER, Device, pretend
from adatom.ops.attention import api
from adatom.registry import ROWS, Row, choose, rows

MACHINES = {
    "sm_70": Device("cuda", 70, 80, 98304),
    "sm_80": Device("cuda", 80, 108, 166912),
    "sm_90": Device("cuda", 90, 132, 232448),
    "sm_100": Device("cuda", 100, 148, 232448),
    "sm_120": Device("cuda", 120, 170, 101376),
    "cpu": CPU,
    "interpreter": INTERPRETER,
}
PASSES = registry.PASSES["attention"]


def posed(machine: str = "sm_90", dtype: torch.dtype = torch.bfloat16, dim: int = 64, length: int = 256, **options):
    """The problem of self-attention (2, 4, length, dim) on an invented machine."""
    with pretend(MACHINES[machine]):
        q = torch.empty(2, 4, length, dim, dtype=dtype)
        return api.problem_of(q, q, q, **options)[0]


def chosen(problem, backend=None) -> dict[str, str]:
    return {op.removeprefix("attention_"): choose(op, problem, backend).backend for op in PASSES}


def every(backend: str) -> dict[str, str]:
    return {"fwd": backend, "bwd": backend, "bwd_bwd": backend, "jvp": backend}


@pytest.mark.parametrize("machine", ["sm_80", "sm_90", "sm_100", "interpreter"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_triton_from_sm_80_up(machine, dtype):
    backends = chosen(posed(machine, dtype))
    assert all(registry.serves("triton", backend) for backend in backends.values())


@pytest.mark.parametrize(
    "problem",
    [
        posed("sm_70"),
        posed("cpu"),
        posed(dtype=torch.float64),
        posed(dim=12),
        posed(dim=264),
        posed("cpu", torch.float64),
    ],
    ids=["sm_70", "cpu", "float64", "head_dim 12", "head_dim 264", "float64 on a cpu"],
)
def test_torch_where_triton_cannot(problem):
    assert chosen(problem) == every("torch_chunked")


def test_the_second_derivative_of_float32_needs_shared_memory():
    small = posed("sm_120", torch.float32, 136)
    assert chosen(small) == every("triton") | {"bwd_bwd": "torch_chunked"}
    assert chosen(posed("sm_120", torch.float32, 136, precision="tf32")) == every("triton")
    assert chosen(posed("sm_120", torch.float32, 128)) == every("triton")
    for machine in ("sm_80", "sm_90"):
        assert chosen(posed(machine, torch.float32, 136)) == every("triton")


def test_the_interpreter_is_a_machine_of_its_own(monkeypatch):
    q = torch.empty(1, 1, 8, 8)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert api.problem_of(q, q, q)[0].device == CPU
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert api.problem_of(q, q, q)[0].device == INTERPRETER


@pytest.mark.parametrize("backend", ["triton", "torch_chunked", "reference"])
def test_explicit_backend(backend):
    assert all(registry.serves(backend, name) for name in chosen(posed(), backend).values())


def test_explicit_backend_never_falls_back():
    for op in PASSES:
        with pytest.raises(NotImplementedError, match="triton: needs a CUDA device"):
            choose(op, posed("cpu"), "triton")
        with pytest.raises(NotImplementedError, match="compute capability 8.0 or newer; this is sm_70"):
            choose(op, posed("sm_70"), "triton")
    q = torch.zeros(1, 1, 4, 12)
    with pytest.raises(NotImplementedError, match="triton"):
        adatom.attention(q, q, q, backend="triton")


def test_unknown_backend_lists_the_known_ones():
    with pytest.raises(ValueError, match="no backend 'cudnn' for attention_fwd; there are: one_tile, triton, torch_ch"):
        choose("attention_fwd", posed(), "cudnn")


def test_deterministic_leaves_rows_that_vary_out(monkeypatch):
    fast = registry.Row("attention_bwd", "fast", "attention.reference:backward", lambda p: None, deterministic=False)
    monkeypatch.setattr(registry, "ROWS", (fast, *registry.ROWS))
    registry.choose.cache_clear()
    free, bound = posed(), posed()._replace(deterministic=True)
    assert chosen(free)["bwd"] == "fast"
    assert chosen(bound)["bwd"] == "triton"
    assert chosen(free, "deterministic") == chosen(bound)
    with pytest.raises(NotImplementedError, match="not deterministic"):
        choose("attention_bwd", bound, "fast")
    registry.choose.cache_clear()


def test_deterministic_is_torchs_flag():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert posed().deterministic
    finally:
        torch.use_deterministic_algorithms(before)
    assert posed().deterministic == before


def test_reasons_are_words_and_the_first_fit_row_is_chosen():
    for machine in MACHINES:
        for options in ({}, {"causal": True}, {"softcap": 3.0}, {"kv_lens": torch.tensor([3, 9])}):
            q = torch.empty(2, 4, 256, 64)
            with pretend(MACHINES[machine]):
                verdicts = adatom.explain("attention", q, q, q, **options)
            assert [(v.op, v.backend) for v in verdicts] == [(r.op, r.backend) for op in PASSES for r in rows(op)]
            for op in PASSES:
                mine = [v for v in verdicts if v.op == op]
                fit = [v for v in mine if v.unfit is None]
                assert [v for v in mine if v.chosen] == fit[:1]
                assert all(v.unfit is None or isinstance(v.unfit, str) and v.unfit for v in mine)
                assert fit[0].backend == choose(op, posed(machine, torch.float32, **options)).backend


def test_explain_prints_every_row_and_computes_nothing():
    q = torch.empty(1, 4, 1 << 20, 64, device="meta").expand(64, -1, -1, -1)
    with pretend(MACHINES["sm_90"]):
        text = str(adatom.explain("attention", q, q, q, causal=True, backend="torch_chunked"))
    assert text.count("-> torch_chunked  runs") == len(PASSES)
    unfit = text.count("at most 128 queries and 64 keys")
    assert text.count("backend='torch_chunked' was asked for") == len(ROWS) - len(PASSES) - unfit
    with pytest.raises(ValueError, match="no op 'convolution'; there are: attention"):
        adatom.explain("convolution", q)


def test_order_is_priority(monkeypatch):
    order = [Row("attention_fwd", name, f"attention.{name}:forward", lambda p: None) for name in ("slow", "fast")]
    monkeypatch.setattr(registry, "ROWS", tuple(order))
    assert registry.choose.__wrapped__("attention_fwd", posed()).backend == "slow"
    monkeypatch.setattr(registry, "ROWS", tuple(reversed(order)))
    assert registry.choose.__wrapped__("attention_fwd", posed()).backend == "fast"


def test_a_predicate_that_raises_is_a_bug_and_not_a_no(monkeypatch):
    def broken(problem):
        raise KeyError("no such field")

    rows = (Row("attention_fwd", "new", "attention.new:forward", broken), *ROWS)
    monkeypatch.setattr(registry, "ROWS", rows)
    with pytest.raises(KeyError, match="no such field"):
        registry.choose.__wrapped__("attention_fwd", posed())


def test_nothing_fits_lists_every_reason(monkeypatch):
    refusing = tuple(Row("attention_fwd", name, "", lambda p, n=name: f"{n} is shy") for name in ("one", "two"))
    monkeypatch.setattr(registry, "ROWS", refusing)
    with pytest.raises(NotImplementedError, match="(?s)one: one is shy.*two: two is shy"):
        registry.choose.__wrapped__("attention_fwd", posed())


def test_quadratic_reference_on_a_gpu_warns(monkeypatch):
    last = tuple(row for row in ROWS if row.backend == "reference")
    monkeypatch.setattr(registry, "ROWS", last)
    with pytest.warns(UserWarning, match="quadratic reference"):
        registry.choose.__wrapped__("attention_fwd", posed())


def test_last_row_of_every_pass_takes_everything():
    for op in PASSES:
        assert rows(op)[-1].unfit(posed("cpu", torch.float64, 7, softcap=2.0)) is None


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r.op}-{r.backend}")
def test_every_launcher_exists(row):
    if evidence.on_gpu(row.target):
        pytest.importorskip("triton")
    assert callable(registry.load(row.target))


_IMPORT = """
import sys, time
import torch
begin = time.perf_counter()
import adatom
took = time.perf_counter() - begin
heavy = [name for name in ("triton", "typer", "rich", "matplotlib", "transformers") if name in sys.modules]
print(took, *heavy)
"""


def test_import_is_light():
    fastest, loaded = 10.0, ""
    for _ in range(3):  # machines hiccup
        took, *heavy = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True).stdout.split()
        fastest, loaded = min(fastest, float(took)), " ".join(heavy)
        if fastest < 0.15:
            break
    print(f"import adatom: {fastest * 1e3:.0f} ms beyond importing torch")
    assert "triton" not in loaded.split()
    assert not loaded, f"import adatom imports {loaded}"
    assert fastest < 0.25
