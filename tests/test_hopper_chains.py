"""Chains of the Hopper backward in order: several sums of dQ, each of every so manyth tile of keys; and tiles that
cross, every other one upwards, those between downwards."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from adatom.device import pretend
from adatom.ops.attention.api import inputs_of

pytest.importorskip("triton.experimental.gluon")

from test_hopper import H100, SHAPES, as_python, blocks_of, run_interpreted  # noqa: E402

from adatom.ops.attention import hopper_bwd as backward  # noqa: E402
from adatom.ops.attention import hopper_bwd_adder as adding  # noqa: E402
from adatom.ops.attention import hopper_bwd_feed as feed  # noqa: E402

SQUARES = [(n, n, -1, 0, None, block_m) for n in (1, 128, 300, 960, 1000, 2100) for block_m in (64, 128)]
CHAINS = [(shape, chains, False) for shape in SHAPES[::5] for chains in (1, 2, 4)]
CHAINS += [(shape, chains, True) for shape in SQUARES for chains in (2, 4)]


def visits_in_order(shape, chains: int, crossed: bool, heads: int, group: int):
    """Of each tile of keys, in the order in which they are taken: its head, its number, and of the blocks of queries
    that it visits, in turn, (its place among all, whether it stores, whose turn it waits for, and passes on)."""
    len_q, len_k, left, right, lens, block_m = shape
    of = dict.fromkeys(("VARLEN", "CUT", "UP", "ABREAST", "DESCENDING", "SHIFTED", "ALONE"), False)
    of = SimpleNamespace(
        **of, LEFT=left >= 0, RIGHT=right >= 0, LENS=lens is not None, CROSSED=crossed, CHAINS=chains, BLOCK_M=block_m
    )
    up = as_python(feed.upwards)
    ends = as_python(feed.own_ends, upwards=up)
    before_visits = as_python(feed.before_visits, before_first=as_python(feed.before_first), own_ends=ends)
    visit = as_python(feed.visit, step=as_python(feed.step), own_ends=ends, upwards=up)
    tile_at = lambda b, hk, n0, *_: (hk, n0)  # noqa: E731
    known = {"piece_of": as_python(feed.piece_of), "head_and_block": as_python(feed.head_and_block)}
    tile_of, chain_of = as_python(feed.tile_of, **known, tile_at=tile_at), as_python(adding.chain_of, upwards=up)
    is_first = as_python(adding.is_first, upwards=up)
    counts, n_m = (heads, heads, heads, group, 1, len_q, len_k, left, right, None), math.ceil(len_q / block_m)
    for t in range(math.ceil(len_k / 128) * heads):
        head, n0 = tile_of(t, None, None, counts, of)
        begin, count = blocks_of(n0 // 128, *shape)
        chain, ahead, before = chain_of(n0, begin, len_k if lens is None else lens, of)
        before_begin, before_count = blocks_of(before // 128, *shape)
        at, visits = before_visits(head, head * n_m, begin, count, 1, n_m, of), []
        for _ in range(count):
            at = m, _, block = visit(*at, head, begin, count, 1, n_m, of)
            first = is_first(m, ahead, begin, before_begin, before_count, of)
            visits.append((m, block * chains + chain, first, ahead))
        yield head, n0 // 128, visits


@pytest.mark.parametrize("programs", [1, 5, 132])
@pytest.mark.parametrize(("shape", "chains", "crossed"), CHAINS)
def test_each_sum_has_every_so_manyth_tile_in_order(shape, chains, crossed, programs):
    """As `adder` goes: whoever is first in a sum stores, and is known to be; others find the number of the tile before
    them there; all come to an end, though programs may take a tile two visits before the end of the last one; and each
    tile adds to each block that it visits once. CROSSED: by descending keys where tiles walk upwards."""
    random.seed(0)
    tiles = list(visits_in_order(shape, chains, crossed, 2, 1 + programs % 2))
    turns, added, running = defaultdict(int), defaultdict(list), [[] for _ in range(programs)]
    wanted = sorted((head, m, j) for head, j, visits in tiles for m, *_ in visits)
    blocks = {j: blocks_of(j, *shape) for _, j, _ in tiles}
    assert wanted == sorted((head, m, j) for head, j, _ in tiles for m in range(blocks[j][0], sum(blocks[j])))

    while tiles or any(running):
        moved = False
        for queue in random.sample(running, programs):  # of visits of its tiles
            ahead_of_end = random.choice((0, 2))
            if tiles and len(queue) <= ahead_of_end:
                head, j, visits = tiles.pop(0)
                queue.extend((head, j, *visit) for visit in visits)
            if not queue:
                continue
            head, j, m, place, first, ahead = queue[0]
            if turns[place] >= (0 if first else ahead):
                assert (turns[place] == 0) == first and turns[place] <= ahead
                turns[place], moved = ahead + 1, True
                added[place].append((head, m, j))
                queue.pop(0)
        assert moved
    for place, found in added.items():
        assert len({(head, m) for head, m, _ in found}) == 1 and {j % chains for _, _, j in found} == {place % chains}
        assert [j for _, _, j in found] == sorted((j for _, _, j in found), reverse=crossed and place % 2 == 0)
    assert sorted(one for found in added.values() for one in found) == wanted


BEHIND = """
import torch
from adatom.ops.attention.hopper_bwd_ends import _behind_kernel

torch.manual_seed(0)
for dim, block_m, chains in ((32, 128, 1), (64, 128, 1), (128, 64, 1), (64, 128, 2), (128, 64, 2), (64, 128, 4)):
    heads, len_q = 3, 200
    n_m = -(-len_q // block_m)
    turns = torch.randint(0, 2, (2 * heads * n_m * chains,), dtype=torch.int32)
    sums = torch.randn(len(turns), 64 * min(dim, 64))
    seen = sums.masked_fill(turns[:, None] == 0, 0.0)
    unseen = sums.masked_fill(turns[:, None] == 0, float("nan"))
    whole = sum(seen.view(-1, chains, 2, sums.shape[1]).unbind(1)).view(-1, sums.shape[1])  # in the kernel's order
    found = []
    for given, look, n in ((whole, False, 1), (seen, False, chains), (unseen, True, chains)):
        dq = torch.full((1, heads, len_q, dim), float("nan"))
        _behind_kernel[(len(whole),)](
            given, dq, turns, None, *dq.stride()[:3], heads, len_q, n_m, 1, 0.5,
            HEAD_DIM=dim, D=dim, LOOK=look, CHAINS=n, VARLEN=False, EARLY=False, PIECE=1, BLOCK_M=block_m,
        )
        found.append(dq)
    assert all(torch.equal(found[0], one) for one in found)
    assert (found[0] == 0).any() and (found[0] != 0).any()
"""


def test_sums_are_added_and_one_that_nobody_wrote_is_zero():
    """What lies there may be NaN."""
    run_interpreted(BEHIND)


def launches(batch, heads, length, dim, options):
    """Out of order, in order, on an H100, under a causal mask."""
    q = torch.empty(batch, heads, length, dim, dtype=torch.bfloat16, device="meta")
    given = {"causal": True, **options}
    k = q.new_empty(batch, given.pop("kv_heads", heads), given.pop("keys", length), dim)
    if "bias" in options:
        given["bias"] = q.new_empty(heads, length, length)
    if "kv_lens" in options:
        given["kv_lens"] = torch.empty(batch, dtype=torch.int32, device="meta")
    with pretend(H100):
        x, o, _ = inputs_of(q=q, k=k, v=k, **given)
        return [backward._launches(x, o, q, q, (q, k, k), False, False, how) for how in (False, True)]


@pytest.mark.parametrize(("batch", "heads", "length", "dim", "options", "chains"), [
    (1, 6, 8192, 64, {}, 2), (1, 12, 4096, 64, {}, 2), (1, 24, 2048, 64, {}, 2), (2, 16, 2048, 64, {}, 1),
    (8, 16, 4096, 64, {}, 1), (1, 6, 8192, 64, {"bias": 8192}, 2), (1, 16, 4096, 128, {"bias": 4096}, 2),
    (1, 8, 8192, 64, {"window": (100, 0)}, 1), (1, 8, 32768, 128, {}, 1), (1, 12, 768, 64, {}, 1),
    (1, 10, 8192, 128, {}, 2), (1, 20, 4096, 128, {}, 1), (1, 3, 8192, 64, {}, 2), (1, 8, 8192, 64, {"keys": 8000}, 2),
    (1, 8, 8192, 64, {"keys": 8500}, 2), (1, 8, 8192, 64, {"kv_lens": True}, 2), (1, 4, 8192, 64, {"softcap": 9.0}, 4),
    (1, 4, 8192, 64, {"kv_lens": True}, 4), (1, 4, 8192, 128, {"kv_lens": True}, 2),
    (1, 24, 2048, 64, {"kv_heads": 8}, 2),
])  # fmt: skip
def test_few_heads_have_several_sums(batch, heads, length, dim, options, chains):
    """In order, where the longest tiles go first, and are few. There is memory for all."""
    fast, plan = launches(batch, heads, length, dim, options)
    assert not plan.main.meta["CROSSED"]
    assert plan.main.meta["CHAINS"] == plan.behind.meta["CHAINS"] == chains and fast.main.meta["CHAINS"] == 1
    assert plan.sums * 128 == chains * batch * heads * length * dim and plan.turns == 2 * chains * plan.blocks
    assert plan.before.meta["TURNS"] == 2 * chains and plan.behind.meta["LOOK"] >= (chains > 1)


def test_no_tiles_cross_beside_the_gradient_of_a_bias_per_key():
    """It leaves at the last visit of a tile that walks downwards."""
    for heads, length in ((8, 4096), (16, 2048)):
        q, bias = (torch.empty(1, heads, n, 64, dtype=torch.bfloat16, device="meta") for n in (length, 1))
        with pretend(H100):
            x, o, _ = inputs_of(q=q, k=q, v=q, bias=bias.new_empty(1, heads, 1, length), causal=True)
            wanted, unwanted = (
                backward._launches(x, o, q, q, (q, q, q), False, is_wanted, True).main.meta
                for is_wanted in (True, False)
            )
        assert wanted["SUMS"] and not wanted["CROSSED"] and unwanted["CROSSED"]


@pytest.mark.parametrize(("batch", "heads", "length", "dim", "options", "group"), [
    (1, 8, 4096, 64, {}, 8), (1, 4, 8192, 64, {}, 4), (1, 8, 8192, 64, {}, 4), (1, 2, 16384, 32, {}, 2),
    (1, 16, 2048, 64, {}, 16), (2, 16, 2048, 64, {}, 0), (1, 12, 4096, 64, {}, 0), (8, 32, 4096, 64, {}, 0),
    (1, 16, 4096, 128, {}, 8), (4, 16, 2048, 128, {}, 16), (2, 12, 2048, 128, {}, 0), (2, 16, 1024, 128, {}, 32),
    (4, 16, 1024, 128, {}, 0), (1, 4, 8192, 128, {"bias": 8192}, 4), (1, 8, 8192, 128, {"bias": 8192}, 0),
    (1, 8, 8192, 64, {"bias": 8192}, 4), (1, 4, 8192, 64, {"softcap": 9.0}, 0), (1, 4, 8192, 128, {"softcap": 9.0}, 4),
    (1, 8, 8192, 64, {"kv_heads": 2}, 4), (1, 8, 8192, 128, {"kv_heads": 2}, 4), (1, 32, 4096, 128, {"kv_heads": 8}, 0),
    (1, 4, 8192, 64, {"keys": 8191}, 0),
    (1, 4, 8192, 64, {"window": (4000, 0)}, 0), (1, 4, 8192, 64, {"kv_lens": True}, 0), (1, 4, 4096, 64, {}, 0),
    (1, 8, 4096, 64, {"causal": False, "window": (None, 5)}, 0), (1, 1, 65536, 64, {}, 0),
    (1, 4, 8192, 64, {"causal": False}, 0),
])  # fmt: skip
def test_which_tiles_cross(batch, heads, length, dim, options, group):
    """In order under a causal mask, as many queries as keys, few tiles, half of which fill the GPU evenly. Programs are
    hardly ever idle then, though nobody adds to a block before whom it waits for."""
    plan = launches(batch, heads, length, dim, options)[1]
    meta = plan.main.meta
    assert meta["CROSSED"] == (group > 0)
    if not group:
        return
    assert meta["CHAINS"] == 2 and not any(meta[name] for name in ("UP", "ABREAST", "SHIFTED", "CUT", "CLAIM"))
    scalars = dict(zip(plan.main.kernel.arg_names[18:], plan.main.scalars))
    assert scalars["group"] == group and meta["LOOPS"] in (1, 3)
    n, time = batch * scalars["kv_heads"], 0
    turns, running = defaultdict(int), []
    tiles = [
        visits for *_, visits in visits_in_order((length, length, -1, 0, None, meta["BLOCK_M"]), 2, True, n, group)
    ]
    least = sum(map(len, tiles)) / 132
    while tiles or running:
        while tiles and len(running) < 132:
            running.append(tiles.pop(0))
        passed = [(v[0][1], v[0][3] + 1) for v in running if v[0][2] or turns[v[0][1]] == v[0][3]]
        running = [v[1:] if v[0][2] or turns[v[0][1]] == v[0][3] else v for v in running]
        turns.update(passed)
        running, time = [v for v in running if v], time + 1
    assert least <= time <= 1.08 * least + 4
