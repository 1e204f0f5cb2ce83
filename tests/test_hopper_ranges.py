"""Ranges of queries that count as heads in the Hopper backward, where few tiles have no mask, and the sum of the parts
of dK and dV that they and heads that share keys leave."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from adatom.device import pretend
from adatom.ops.attention import limits
from adatom.ops.attention.api import inputs_of
from adatom.ops.attention.problem import problem

pytest.importorskip("triton.experimental.gluon")

from types import SimpleNamespace  # noqa: E402

from test_hopper import H100, as_python, run_interpreted  # noqa: E402

from adatom.ops.attention import hopper_bwd as backward  # noqa: E402
from adatom.ops.attention import hopper_bwd_feed as feed  # noqa: E402


def plan_of(heads, length, dim, ordered=False, kv_heads=None, keys=None, **options):
    """The launches of a backward on an H100, and the numbers of its main kernel by name."""
    q, k = (
        torch.empty(1, h, n, dim, dtype=torch.bfloat16, device="meta")
        for h, n in ((heads, length), (kv_heads or heads, keys or length))
    )
    with pretend(H100):
        x, o, _ = inputs_of(q=q, k=k, v=k, **options)
        plan = backward._launches(x, o, q, q, (q, k, k), False, False, ordered)
        served = (limits.hopper_bwd_ordered if ordered else limits.hopper_bwd)(problem(x, o)) is None
    return plan, dict(zip(plan.main.kernel.arg_names[18:], plan.main.scalars)), served


@pytest.mark.parametrize(("ranges", "length", "block_m"), [(1, 200, 64), (2, 256, 128), (4, 512, 64), (3, 384, 128)])
def test_ranges_hold_each_block_of_queries_of_each_head_once(ranges, length, block_m):
    of, heads = SimpleNamespace(RANGES=ranges > 1, BLOCK_M=block_m), 5
    counts = (heads * ranges, None, None, None, None, length, None, None, None, (0, 0, 1, 0, ranges))
    rows_of, blocks = as_python(feed.rows_of), math.ceil(length / block_m)
    seen = [rows_of(h, m, counts, of) for h in range(heads * ranges) for m in range(blocks)]
    assert sorted(seen) == [(h, m * block_m) for h in range(heads) for m in range(ranges * blocks)]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_ranges_fill_the_gpu(dim, ordered):
    """They are whole blocks of queries, and make no more tiles than five for each multiprocessor."""
    found = 0
    for heads, length, keys in itertools.product((1, 2, 3, 5, 8, 12, 40), (600, 1024, 2000, 4096), (1024, 4096)):
        plan, at, _ = plan_of(heads, length, dim, ordered, keys=keys)
        ranges, tiles = at["ranges"], heads * keys // 128
        assert plan.main.meta["RANGES"] == (ranges > 1)
        if ranges == 1:
            assert (at["heads"], at["len_q"], plan.splits) == (heads, length, 1)
            continue
        found += 1
        assert at["heads"] == at["kv_heads"] == heads * ranges and plan.splits == at["splits"] == ranges
        assert ranges * at["len_q"] == math.ceil(length / plan.block_m) * plan.block_m and at["len_q"] >= 256
        assert plan.blocks == heads * ranges * at["len_q"] // plan.block_m
        assert at["n_tiles"] == tiles * ranges <= 5 * 132 and not (plan.main.meta["CUT"] or plan.main.meta["SHIFTED"])
        assert tiles * ranges >= 0.93 * 132 * math.ceil(tiles * ranges / 132) > 0.93 * tiles
        assert backward._place(torch.empty(1, heads, keys, dim, device="meta"), plan.splits).shape[1] == heads * ranges
    assert found > 12


@pytest.mark.parametrize(("heads", "length", "dim", "ordered", "ranges", "chains"), [
    (4, 2048, 64, False, 2, 1), (4, 2048, 64, True, 2, 8), (2, 4096, 64, True, 4, 8), (1, 2048, 32, True, 8, 8),
    (8, 1024, 64, True, 2, 4), (5, 4096, 64, True, 4, 2), (5, 4096, 128, True, 4, 1), (5, 4096, 128, False, 1, 1),
    (1, 8192, 128, True, 4, 8), (4, 2048, 128, False, 2, 1), (16, 2048, 64, False, 1, 1), (3, 1100, 64, True, 1, 1),
])  # fmt: skip
def test_which_problems_have_ranges(heads, length, dim, ordered, ranges, chains):
    """Enough to fill the GPU, in order more, if they are long; several sums of dQ, by how many tiles of a head run at
    once. Not where tiles fill it, a last round of few is cut, or blocks of queries cannot be shared out."""
    plan, at, _ = plan_of(heads, length, dim, ordered)
    assert (at["ranges"], plan.main.meta["CHAINS"]) == (ranges, chains)
    assert plan.sums == plan.blocks * chains * plan.block_m * dim // 128


def test_what_has_no_ranges():
    lens, bias = torch.empty(1, dtype=torch.int32, device="meta"), torch.empty(1, 1, 2048, 2048, device="meta")
    for options in ({"causal": True}, {"window": (300, 300)}, {"kv_lens": lens}, {"bias": bias}):
        assert plan_of(4, 2048, 64, **options)[1]["ranges"] == 1, options
    assert plan_of(4, 2048, 64, softcap=5.0)[1]["ranges"] == 2
    assert plan_of(4, 2048, 64, kv_heads=2)[1]["ranges"] == 2  # none share keys any more
    assert plan_of(32, 512, 32)[0].main.meta["INSIDE"] and plan_of(32, 512, 32)[1]["ranges"] == 1


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_sixteen_tiles_without_a_mask_are_served(dim, ordered):
    assert plan_of(1, 2048, dim, ordered)[2] and plan_of(4, 2048, dim, ordered, kv_heads=1)[2]
    assert not plan_of(1, 1024, dim, ordered)[2] and not plan_of(4, 1000, dim, ordered)[2]
    assert plan_of(1, 2048, dim, ordered, causal=True)[2] == (dim > 32)


def test_parts_of_dk_and_dv_are_added():
    """Those of one head lie side by side, whether (batch, heads, length, dim) or (tokens, heads, dim)."""
    run_interpreted("""
import torch
from adatom.ops.attention import hopper_bwd_cut as cut

torch.manual_seed(0)
for varlen in (False, True):
    for splits, dtype, wide in ((2, torch.bfloat16, False), (5, torch.bfloat16, False), (8, torch.float16, True)):
        batch, heads, length, dims = 1 if varlen else 2, 3, 37, (24, 32)
        shape = lambda n, d: (length, n, d) if varlen else (batch, n, length, d)
        large = 1e5 * torch.tensor([1.0, -1.0] * 12)[: heads * splits].view(-1, *[1] * (1 if varlen else 2))
        parts = [torch.randn(shape(heads * splits, d)) + large * wide for d in dims]
        parts = [part.to(torch.float32 if wide else dtype) for part in parts]
        dk, dv = (torch.full(shape(heads, d), float("nan"), dtype=dtype) for d in dims)
        strides = [n for x in (dk, dv) for n in ((0, x.stride(1), x.stride(0)) if varlen else x.stride()[:3])]
        cut._parts_kernel[(2 * -(-length // 16) * heads * batch,)](
            *parts, dk, dv, *strides, heads, splits, length, HEAD_DIM=dims[0], HEAD_DIM_V=dims[1], D=32, VARLEN=varlen,
            EARLY=False, PIECE=8, ROWS=16)
        for part, grad in zip(parts, (dk, dv)):
            wanted = part.double().unflatten(1, (heads, splits)).sum(2)
            torch.testing.assert_close(grad.double(), wanted, rtol=2**-8, atol=1e-3)
""")
