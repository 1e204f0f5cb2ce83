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


def plan_of(heads, length, dim, ordered=False, kv_heads=None, keys=None, sms=132, **options):
    """The launches of a backward on an H100, or one with so many multiprocessors, the numbers of its main kernel by
    name, and whether the row serves it."""
    q, k = (
        torch.empty(1, h, n, dim, dtype=torch.bfloat16, device="meta")
        for h, n in ((heads, length), (kv_heads or heads, keys or length))
    )
    with pretend(H100._replace(sms=sms)):
        x, o, _ = inputs_of(q=q, k=k, v=k, **options)
        plan = backward._launches(x, o, q, q, (q, k, k), False, False, ordered)
        served = (limits.hopper_bwd_ordered if ordered else limits.hopper_bwd)(problem(x, o)) is None
    return plan, dict(zip(plan.main.kernel.arg_names[18:], plan.main.scalars)), served


@pytest.mark.parametrize(("ranges", "length", "block_m"), [(2, 200, 64), (3, 1100, 128), (4, 512, 64), (5, 2100, 128)])
def test_ranges_hold_each_query_of_each_head_once(ranges, length, block_m):
    """Their blocks are numbered as those of whole heads are, and only the last has fewer."""
    of, batch, heads = SimpleNamespace(RANGES=True, BLOCK_M=block_m, LENS=False), 2, 3
    counts = (heads * ranges, heads * ranges, None, None, ranges, length, 77, None, None, (0, 0, 1, 0, ranges))
    range_of = as_python(feed.range_of)
    rows_of = as_python(feed.rows_of, range_of=range_of)
    tile_at = as_python(feed.tile_at, range_of=range_of, keys_of=lambda Lens, b, len_k, LENS: len_k)
    seen, stride = {}, math.ceil(length / block_m)
    for b, h in itertools.product(range(batch), range(heads * ranges)):
        _, _, _, queries, _, _, _, first, blocks = tile_at(b, h, 0, None, counts, of)
        assert 0 < queries <= math.ceil(stride / ranges) * block_m and blocks == math.ceil(queries / block_m)
        assert queries % block_m == 0 or (h + 1) % ranges == 0
        for m in range(blocks):
            seen[first + m] = (b, *rows_of(h, m, counts, of))
    rows = itertools.product(range(batch), range(heads), range(0, length, block_m))
    assert [seen[at] for at in range(batch * heads * stride)] == list(rows) and len(seen) == batch * heads * stride


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_ranges_end_sooner(dim, ordered):
    """Of so many visits of blocks of queries, one behind the other, a tenth at least is saved. None is empty, nor
    shorter than 256 queries but the last, and there are no more tiles than five for each multiprocessor."""
    found, lengths = 0, (600, 1024, 2000, 2176, 4096)
    for heads, length, keys, sms in itertools.product((1, 2, 3, 5, 8, 12, 40), lengths, (1024, 4096), (132, 78)):
        plan, at, served = plan_of(heads, length, dim, ordered, keys=keys, sms=sms)
        ranges, tiles, blocks = at["ranges"], heads * keys // 128, math.ceil(length / plan.block_m)
        each = math.ceil(blocks / ranges)
        assert plan.main.meta["RANGES"] == (ranges > 1) and at["len_q"] == length
        assert at["heads"] == at["kv_heads"] == heads * ranges and plan.splits == at["splits"] == ranges
        assert plan.blocks == heads * blocks and (ranges - 1) * each < blocks
        rounds = math.ceil(tiles * ranges / sms)
        if ranges > 1:
            found += 1
            assert rounds * each <= 0.9 * blocks * math.ceil(tiles / sms) and ranges * 256 <= length
            assert at["n_tiles"] == tiles * ranges <= 5 * sms
            assert not (plan.main.meta["CUT"] or plan.main.meta["SHIFTED"])
        elif served and length >= 1024 and not plan.main.meta["CUT"]:  # most of the GPU is busy
            assert tiles > 0.5 * sms
    assert found > 40


@pytest.mark.parametrize(("heads", "length", "dim", "ordered", "ranges", "chains"), [
    (4, 2048, 64, False, 2, 1), (4, 2048, 64, True, 2, 8), (2, 4096, 64, True, 4, 8), (1, 2048, 32, True, 8, 8),
    (8, 1024, 64, True, 2, 4), (5, 4096, 64, True, 4, 2), (5, 4096, 128, True, 4, 1), (5, 4096, 128, False, 1, 1),
    (1, 8192, 128, True, 4, 8), (4, 2048, 128, False, 2, 1), (16, 2048, 64, False, 1, 1), (3, 1100, 64, True, 3, 4),
    (1, 2176, 64, False, 6, 1), (4, 600, 64, False, 2, 1), (4, 500, 64, False, 1, 1), (32, 4096, 64, True, 1, 1),
])  # fmt: skip
def test_which_problems_have_ranges(heads, length, dim, ordered, ranges, chains):
    """Enough to fill the GPU, in order more, if they are long; several sums of dQ, by how many tiles of a head run at
    once. Not where tiles fill it, a last round of few is cut, or queries are few."""
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


def test_many_queries_have_one_sum():
    """There is memory for each: none but one where queries of a range are more than twice the keys."""
    assert plan_of(1, 2**20, 64, True, keys=4096)[0].main.meta["CHAINS"] == 1
    assert plan_of(1, 16384, 64, True, keys=4096)[0].main.meta["CHAINS"] == 8
    assert plan_of(4, 4096, 64, True, keys=128)[0].main.meta["CHAINS"] == 1  # a tile a head


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_sixteen_tiles_without_a_mask_are_served(dim, ordered):
    plan, at, served = plan_of(1, 2048, dim, ordered)
    assert served and at["ranges"] == 8
    assert plan_of(4, 2048, dim, ordered, kv_heads=1)[2]
    assert not plan_of(1, 1024, dim, ordered)[2] and not plan_of(4, 1000, dim, ordered)[2]
    assert not plan_of(4, 1024, dim, ordered, kv_heads=1, keys=4096)[2]  # heads share so many keys that none is split
    assert plan_of(1, 2048, dim, ordered, causal=True)[2] == (dim > 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [(2, 3, 5, 8), (5, 3, 8)])
def test_parts_go_from_kernel_to_kernel(size, dtype, monkeypatch):
    """float16: to memory of their own, in float32, behind what TMA would write. And kernels of other streams wait."""
    turns: list[torch.device] = []

    def main(*tensors):
        assert turns == [x.device]  # of kernels that wait for each other
        assert [t.shape[-3] for t in tensors[7:9]] == [3 if dtype == torch.float16 else 12] * 2
        for t, n in zip(tensors[12:14], (1.0, 2.0)):
            assert t.shape[1] == 12 and t.dtype == torch.float32
            t.fill_(n)

    def added(dk_parts, dv_parts, dk, dv):
        for part, grad in ((dk_parts, dk), (dv_parts, dv)):
            grad.copy_(part.unflatten(1, (3, 4)).sum(2))

    def nothing(*_):
        pass

    main.meta = {"SHIFTED": True, "DQ_BEHIND": False}
    monkeypatch.setattr(backward.launch, "take_turn", turns.append)
    none = backward.Gradient()
    plan = backward.Launches(None, nothing, main, nothing, added, 0, 1, 64, 1, False, none, False, 4, ())
    monkeypatch.setattr(backward, "_launches", lambda *_: plan)
    x = torch.zeros(size, dtype=dtype)
    lens = {} if len(size) == 4 else dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, 5]).int())
    given, options, _ = inputs_of(q=x, k=x, v=x, **lens)
    _, dk, dv, _, _ = backward.backward(given, options, x, x[..., 0], x, None, False)
    assert dk.shape == dv.shape == x.shape and (dk == 4).all() and (dv == 8).all()


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
