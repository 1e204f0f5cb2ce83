"""The Hopper kernels for float32 under a bias that many (batch, head) share, run as Python, as in
tests/test_hopper_shared.py; the Triton kernels ahead of them by Triton's interpreter."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

import gluon_python as shared  # noqa: E402
import test_hopper_shared_lent as lent  # noqa: E402
from gluon_python import Box  # noqa: E402
from test_hopper_deep import Machine, bound, play, register  # noqa: E402
from test_hopper_shared import H100, of_slices  # noqa: E402

from adatom.device import pretend  # noqa: E402
from adatom.ops.attention import hopper_float_bias as bias_part  # noqa: E402
from adatom.ops.attention import hopper_float_bwd as bwd  # noqa: E402
from adatom.ops.attention import hopper_float_ends as ends  # noqa: E402
from adatom.ops.attention import hopper_float_fwd as fwd  # noqa: E402
from adatom.ops.attention import hopper_float_tiles as tiles_part  # noqa: E402
from adatom.ops.attention import limits, reference  # noqa: E402
from adatom.ops.attention.api import inputs_of  # noqa: E402
from adatom.ops.attention.problem import problem  # noqa: E402
from adatom.ops.attention.triton_call import Call  # noqa: E402
from adatom.registry import choose  # noqa: E402
from adatom.tiles.launch import observed  # noqa: E402

F16, F32 = torch.float16, torch.float32


class Tile(shared.Tile):
    """Shared memory, which may be looked at as tiles of another type."""

    def index(self, i: int) -> Tile:
        assert 0 <= i < len(self.x)
        return Tile(self.x[i])

    def slice(self, start: int, n: int, dim: int = 0) -> Tile:
        return Tile(self.x.narrow(dim, start, n))

    def reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Tile:  # type: ignore[override]
        return Tile(self.flat.view(dtype).view(shape))


class Pointer:
    def __init__(self, x: torch.Tensor, at: Any = 0) -> None:
        self.x, self.at = x.view(-1), at

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.x, self.at + more)

    def load(self, mask: Any = None, other: float = 0.0) -> Any:
        if mask is None:
            return self.x[self.at].item()
        at, mask = torch.broadcast_tensors(self.at, mask)
        return register(torch.where(mask, self.x[at.clamp(max=len(self.x) - 1)], other))

    def store(self, value: torch.Tensor, mask: torch.Tensor) -> None:
        at, value, mask = torch.broadcast_tensors(torch.as_tensor(self.at), value, mask)
        self.x[at[mask]] = value[mask].as_subclass(torch.Tensor)


def memory(dtype: torch.dtype, *shape: int) -> Tile:
    return Tile(torch.full(shape, math.nan, dtype=dtype))


def python(machine: Machine, module: ModuleType, programs: int, **known: Any) -> dict[str, Any]:
    names = shared.python(machine, module, programs)
    for name, value in vars(tiles_part).items():
        if hasattr(value, "fn") and value.fn.__module__ == tiles_part.__name__:
            names[name] = bound(value, names)
    names["tile_of"] = lambda *a, of=names["tile_of"]: tuple(map(shared.Whole, of(*a)))
    names |= {name: value.value for name, value in vars(module).items() if name in ("PEAK",)}
    language = names["gl"]
    language.float16, language.NVMMASharedLayout = F16, lambda *a, **k: None
    language.load = lambda at, mask=None, other=0.0: at.load(mask, other)
    names |= known
    return names


def run(module: ModuleType, programs: int, roles: Any, together: bool = False, **known: Any) -> None:
    """All programs of a kernel, one after the other or all at once."""

    def one(pid: int) -> None:
        machine = Machine(pid, pid)
        names = python(machine, module, programs, **known)
        names |= {"wait_turn": shared.wait_turn, "pass_turn": shared.pass_turn(machine)}
        machine.python = lambda: names  # type: ignore[method-assign]
        play(machine, roles(machine))

    with ThreadPoolExecutor(programs if together else 1) as pool:
        for _ in pool.map(one, range(programs)):
            pass


def forward(x: Any, o: Any, parts: Any, units: torch.Tensor, programs: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, len_q, _ = x.q.shape
    len_k, n_heads = x.k.shape[2], batch * heads
    repeats, _, _, _, several = of_slices(x)
    out = torch.full((*x.q.shape[:3], x.v.shape[3]), math.nan)
    lse = torch.full(x.q.shape[:3], math.nan)
    counts = heads, repeats, len_q, len_k, -(-len_q // 128) * n_heads
    boxes = Box(parts[0], 64, 32), Box(parts[1], 128, 32), Box(parts[2], 128, 32), Box(x.bias, 64, 128)
    n = fwd.STAGES.value

    def roles(machine: Machine) -> dict[str, tuple[Any, ...]]:
        ring = machine.barriers
        ends_as = memory(F32, 2, 64, 32)
        tiles = (
            ends_as.reinterpret(F16, [4, 64, 32], None), memory(F16, 2 * n, 128, 32), memory(F16, 2 * n, 128, 32),
            memory(F32, 2 * n, 64, 128), ends_as,
        )  # fmt: skip
        bars = ring(1, 4), ring(1, 2), ring(n, 6), ring(n, 2)
        into = Box(out, 64, 32), Pointer(lse), Pointer(units)
        return {"_producer": (*boxes, several, tiles, bars, counts, 128)} | {
            f"_consumer {c}": (*into, tiles, bars, counts, n_heads, o.scale, c, len_k % 128 == 0, 128) for c in range(2)
        }

    run(fwd, programs, roles)
    return out, lse


def backward(
    x: Any, o: Any, parts: Any, rows: Any, delta: Any, factors: Any, done: Any, chains: int, split: int, together: bool
) -> Any:  # fmt: skip
    """dq, dk, dv, dbias; the sharers of a tile in `split` parts, three of them summed in registers, by so many chains
    of programs, which run one after the other or all at once."""
    batch, heads, len_q, _ = x.q.shape
    len_k, n_heads = x.k.shape[2], batch * heads
    repeats, bias_heads, slices, sharing, several = of_slices(x)
    blocks = -(-len_q // 128)
    some = bias_heads < heads
    dk, dv = torch.full_like(x.k, math.nan), torch.full_like(x.v, math.nan)
    over = x.bias.transpose(2, 3).contiguous()
    n, m = bwd.STAGES.value, bwd.QUERIES.value

    def of_keys(machine: Machine) -> dict[str, tuple[Any, ...]]:
        ring = machine.barriers
        counts = heads, repeats, blocks * 128, len_q, len_k, -(-len_k // 128) * n_heads
        ends_as = memory(F32, 2, 64, 32), memory(F32, 2, 64, 32)
        k, v = (tile.reinterpret(F16, [4, 64, 32], None) for tile in ends_as)
        tiles = (
            memory(F16, 2 * n, m, 32), k, memory(F16, 2 * n, m, 32), v, memory(F32, n, m), memory(F32, n, m),
            memory(F32, 2 * n, 64, m), *ends_as,
        )  # fmt: skip
        bars = ring(n, 8), ring(n, 2), ring(1, 8), ring(1, 2)
        boxes = [Box(t, size, 32) for t, size in zip(parts, (m, 64, 64, m))]
        lines = Box(rows, m), Box(delta, m)
        return {"_producer": (*boxes, *lines, Box(over, 64, m), several, tiles, bars, counts)} | {
            f"_consumer {c}": (Box(dk, 64, 32), Box(dv, 64, 32), Pointer(factors), tiles, bars, counts, n_heads,
                               o.scale, c)
            for c in range(2)
        }  # fmt: skip

    run(bwd, chains, of_keys)
    dq, done = torch.full_like(x.q, math.nan), done.clone()
    dbias = torch.full((split, *x.bias.shape), math.nan)

    def of_sums(machine: Machine) -> dict[str, tuple[Any, ...]]:
        ring, n, m = machine.barriers, bias_part.STAGES.value, bias_part.DQ_STAGES.value
        tiles_in_all = blocks * -(-len_k // 128) * slices * split
        counts = (heads, repeats, bias_heads, sharing, split, blocks * 128, len_q, len_k, tiles_in_all)
        tiles = (
            *(memory(F16, 2 * n, 128, 32) for _ in range(4)), memory(F32, n, 128), memory(F32, n, 128),
            memory(F32, 2, 64, 128), memory(F32, m, 128, 32),
        )  # fmt: skip
        bars = ring(n, 10), ring(n, 2), ring(1, 2), ring(1, 2)
        dq_bars = ring(m, 1), ring(m, 2), ring(m, 1)
        boxes = *(Box(t, 128, 32) for t in parts), Box(rows, 128), Box(delta, 128), Box(x.bias, 64, 128)
        options = (shared.Whole(machine.pid), slices, counts)
        handed = (Box(dq, 128, 32), shared.Pointer(done), tiles[7], dq_bars, *options, some)
        into = Pointer(dbias), Pointer(factors), tiles, bars, dq_bars
        even = len_k % 128 == 0
        return {"_fetcher": handed, "_passer": handed, "_producer": (*boxes, several, tiles, bars, *options, some)} | {
            f"_consumer {c}": (*into, *options, n_heads, o.scale, c, some, even) for c in range(2)
        }

    run(bias_part, chains * -(-len_k // 128), of_sums, together, RUN=3)
    return dq, dk, dv, dbias.double().sum(0)


CASES = (
    ((4, 2), (1, 2), (130, 136), (32, 32), True, 1.0),
    ((2, 2), (1, 2), (128, 264), (32, 32), False, 1e-12),
    ((3, 2), (1, 1), (64, 264), (24, 32), True, 1e9),
    ((4, 1), (2, 1), (200, 128), (32, 24), True, 1.0),
    ((2, 2), (1, 2), (64, 136), (32, 32), False, 0.0),
    ((2, 1), (1, 1), (64, 136), (32, 32), True, 0.0),
)


def judge(case: tuple[Any, ...], rows_of_a_program: int) -> None:
    """Everything, in a process with Triton's interpreter."""
    (batch, heads), shape, (len_q, len_k), (dim, dim_v), masked, magnitude = case
    torch.manual_seed(0)
    torch.set_num_threads(1)
    q, k = (torch.randn(batch, heads, n, dim) for n in (len_q, len_k))
    v, dout = (torch.randn(batch, heads, n, dim_v) for n in (len_k, len_q))
    v[0, 0] *= magnitude  # scales are of each (batch, head)
    dout[-1, 0] *= magnitude
    bias = torch.randn(*shape, len_q, len_k)
    if masked:
        bias[..., 3, :] = -math.inf  # sees nothing
        bias[..., 5, :90] = -1e9
        bias[..., 7, :90] = torch.finfo(F32).min
        bias[..., 9, 60:] = -math.inf
    x, o, _ = inputs_of(q=q, k=k, v=v, bias=bias)
    exact = x._replace(q=q.double(), k=k.double(), v=v.double(), bias=bias.double())
    true_out, true_lse = reference.forward(exact, o)
    dlse = torch.randn(batch, heads, len_q) if masked else None

    def interpret(kernel: Any, args: tuple[Any, ...], meta: dict[str, Any], spill: int) -> None:
        assert len(args) == sum(name not in meta for name in kernel.arg_names)
        meta = {name: meta[name] for name in kernel.arg_names if name in meta} | {"EARLY": False}
        kernel[(batch * heads,)](*args, **meta)

    ends._ROWS = rows_of_a_program
    with observed(interpret):
        *parts, units = ends.in_parts(x, o)
        out, lse = true_out.float(), true_lse.float()
        do, rows, delta, factors, done = ends.ahead(x, o, out, lse, dout, dlse, units, 128)
    assert not done.any()
    for given, found, inverse in zip((q, k, v, dout), (*parts, do), (*units[:3], factors[ends.OF_DV.value] * 2**14)):
        whole = (found[..., :32].double() + found[..., 32:].double()) * inverse.view(batch, heads, 1, 1).double()
        largest = given.abs().amax((2, 3), keepdim=True).double().clamp(min=1e-30)
        assert ((whole[..., : given.shape[3]] - given).abs() / largest).max() < 2**-22
        assert not whole[..., given.shape[3] :].any()
    for programs in (1, 3):
        got, got_lse = forward(x, o, parts, units, programs)
        far = true_lse < -1e5  # a lse of -1e9 is coarse
        close(got, true_out, "out")
        assert torch.allclose(got_lse.double()[~far], true_lse[~far], atol=2e-6, rtol=1e-6)
        assert torch.allclose(got_lse.double(), true_lse, rtol=1e-6, atol=1e-5)
    found = []
    want = reference.backward(exact, o, true_out, true_lse, dout.double(), dlse, True)[:4]
    for chains, split, together in ((1, 1, True), (2, 2, True), (2, 2, False)):
        results = backward(x, o, (*parts, do), rows, delta, factors, done, chains, split, together)
        for name, got, true in zip(("dq", "dk", "dv", "dbias"), results, want):
            close(got, true, name)
        found.append(results[0])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])  # pieces of dQ are added in one order


def close(got: torch.Tensor, true: torch.Tensor, name: str) -> None:
    """To the accuracy of float32, for each (batch, head)."""
    error = (got.double() - true).norm(dim=(2, 3)) / true.norm(dim=(2, 3)).clamp(min=1e-30)
    assert error.max() < 2e-6, (name, error)


@pytest.mark.parametrize("i", range(len(CASES)))
def test_roles(i):
    tests = Path(__file__).parent
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{tests.parent}:{tests}"}
    program = f"import test_hopper_float as t; t.judge(t.CASES[{i}], {(64, 512)[i % 2]})"
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "options, forward_word, backward_word",
    [
        ({}, None, None),
        ({"length": 300}, None, None),
        ({"length": 200}, "256", "256"),
        ({"batch": 8}, "16 batch", "16 batch"),
        ({"dim": 40}, "head_dims", "head_dims"),
        ({"causal": True}, "no mask", "no mask"),
        ({"bias_heads": 4, "bias_batch": 32}, "share", "share"),
        ({"bias_dtype": torch.bfloat16}, "q's dtype", "q's dtype"),
        ({"bias_grad": False}, None, "nobody wants"),
        ({"batch": 16, "length": 16384}, None, None),
        ({"batch": 16, "length": 16500}, None, "16384 keys"),
        ({"precision": "tf32"}, "tf32x3", "tf32x3"),
        ({"dtype": torch.bfloat16, "bias_dtype": torch.bfloat16, "precision": None}, "float32", "float32"),
    ],
    ids=str,
)
def test_limits(options, forward_word, backward_word):
    n, batch, dim = options.get("length", 512), options.get("batch", 32), options.get("dim", 32)
    q = torch.empty(batch, 4, n, dim, dtype=options.get("dtype", F32), device="meta")
    shape = options.get("bias_batch", 1), options.get("bias_heads", 4), n, -(-n // 8) * 8
    bias = torch.empty(shape, dtype=options.get("bias_dtype", F32), device="meta")[..., :n]
    with pretend(H100):
        causal, precision = options.get("causal", False), options.get("precision", "tf32x3")
        x, o, _ = inputs_of(q=q, k=q, v=q, bias=bias, causal=causal, precision=precision)
        posed = problem(x, o, options.get("bias_grad", True))
        if options == {}:
            assert choose("attention_bwd", posed, "deterministic").backend == "hopper_float"
    for unfit, word in ((limits.hopper_float_fwd, forward_word), (limits.hopper_float_bwd, backward_word)):
        why = unfit(posed)
        assert (why is None) if word is None else word in why, why


@pytest.mark.parametrize("sms", [16, 60, 114, 132])
def test_programs_are_whole_chains(sms):
    """Up to the longest that is taken, and no more of them than there are multiprocessors."""
    device = H100._replace(sms=sms)
    for n in (256, 520, 1024, 2048, 8192, 16384, 32768):
        q = torch.empty(256, 4, n, 32, device="meta")
        with pretend(device):
            x, o, _ = inputs_of(q=q, k=q, v=q, bias=q[:1, ..., :1].expand(1, 4, n, n))
            why = limits.hopper_float_bwd(problem(x, o, True)._replace(bias_tma=True))
            rounded = 1 << (n - 1).bit_length()
            assert (why is None) == (rounded <= 128 * sms), why
            if why is None:
                launch = bias_part.sums_launch(Call(x, o), x.bias, n)
                assert 0 < launch.programs <= sms and launch.programs % -(-n // 128) == 0


def test_results_repeat_under_load_and_in_many_streams(cuda):
    shapes = (72, 4, 500, 520), (16, 16, 768, 768), (64, 1, 900, 1000), (16, 2, 1100, 4088), (256, 4, 256, 256)
    lent.check_repeats(fwd.forward, bwd.backward, F32, 6, shapes)
