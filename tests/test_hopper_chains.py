"""Chains of the Hopper backward in order: several sums of dQ, each of every so manyth tile of keys."""

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


@pytest.mark.parametrize("programs", [1, 5, 132])
@pytest.mark.parametrize("chains", [1, 2, 4])
@pytest.mark.parametrize("shape", SHAPES[::3])
def test_each_sum_has_every_so_manyth_tile_in_order(shape, chains, programs):
    """As `adder` goes: whoever is first in a sum stores, and is known to be; others find the number of the tile before
    them there; all come to an end; and each tile adds to each block that it visits once."""
    random.seed(0)
    sum_of = as_python(adding.sum_of)
    plan, heads, n_n = SimpleNamespace(CHAINS=chains), 2, math.ceil(shape[1] / 128)
    n_m = math.ceil(shape[0] / shape[5])
    turns, added, running = defaultdict(int), defaultdict(list), []
    tiles = [(head, j) for j in range(n_n) for head in range(heads)]

    def walk(head: int, j: int):
        begin, count = blocks_of(j, *shape)
        before_begin, before_count = blocks_of(j - chains, *shape)
        for m in reversed(range(begin, begin + count)):
            place, ahead = sum_of(head * n_m + m, j, plan)
            first = ahead == 0 or m >= before_begin + before_count
            while turns[place] < (0 if first else ahead):
                yield False
            assert (turns[place] == 0) == first and turns[place] <= ahead
            turns[place] = ahead + 1
            added[place].append((head, m, j))
            yield True

    while tiles or running:
        while tiles and len(running) < programs:
            running.append(walk(*tiles.pop(0)))
        moved = [next(walker, None) for walker in running]
        assert any(done is not False for done in moved)
        running = [walker for walker, done in zip(running, moved) if done is not None]
        random.shuffle(running)
    for place, found in added.items():
        assert len({(head, m) for head, m, _ in found}) == 1 and {j % chains for _, _, j in found} == {place % chains}
        assert [j for _, _, j in found] == sorted(j for _, _, j in found)
    visits = [(h, m, j) for h in range(heads) for j in range(n_n) for m in range(sum(blocks_of(j, *shape)))]
    visits = [(h, m, j) for h, m, j in visits if m >= blocks_of(j, *shape)[0]]
    assert sorted(one for found in added.values() for one in found) == sorted(visits)


BEHIND = """
import torch
from adatom.ops.attention.hopper_bwd_ends import _behind_kernel

torch.manual_seed(0)
for dim, block_m, chains in ((32, 128, 1), (64, 128, 1), (128, 64, 1), (64, 128, 2), (128, 64, 2)):
    heads, len_q = 3, 200
    n_m = -(-len_q // block_m)
    turns = torch.randint(0, 2, (2 * heads * n_m * chains,), dtype=torch.int32)
    sums = torch.randn(len(turns), 64 * min(dim, 64))
    seen = sums.masked_fill(turns[:, None] == 0, 0.0)
    unseen = sums.masked_fill(turns[:, None] == 0, float("nan"))
    whole = seen.view(-1, chains, 2, sums.shape[1]).sum(1).view(-1, sums.shape[1])
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


@pytest.mark.parametrize(("batch", "heads", "length", "dim", "options", "chains"), [
    (1, 8, 8192, 64, {}, 2), (1, 16, 8192, 64, {}, 2), (2, 16, 4096, 64, {}, 1), (1, 8, 4096, 64, {}, 1),
    (8, 16, 4096, 64, {}, 1), (1, 8, 8192, 64, {"bias": 8192}, 2), (1, 16, 4096, 128, {"bias": 4096}, 2),
    (1, 8, 8192, 64, {"window": (100, 0)}, 1), (1, 8, 32768, 128, {}, 1), (1, 8, 768, 64, {}, 1),
    (1, 8, 8192, 64, {"keys": 8000}, 1), (1, 8, 8192, 64, {"keys": 8500}, 2), (1, 8, 8192, 64, {"kv_lens": True}, 1),
    (1, 16, 8192, 64, {"kv_heads": 2}, 2),
])  # fmt: skip
def test_few_heads_have_two_sums(batch, heads, length, dim, options, chains):
    """In order, where the longest tiles go first, without a timetable, and tiles are few. There is memory for both."""
    q = torch.empty(batch, heads, length, dim, dtype=torch.bfloat16, device="meta")
    given = {"causal": True, **options}
    k = q.new_empty(batch, given.pop("kv_heads", heads), given.pop("keys", length), dim)
    if "bias" in options:
        given["bias"] = q.new_empty(heads, length, length)
    if "kv_lens" in options:
        given["kv_lens"] = torch.empty(batch, dtype=torch.int32, device="meta")
    with pretend(H100):
        x, o, _ = inputs_of(q=q, k=k, v=k, **given)
        fast, plan = (backward._launches(x, o, q, q, (q, k, k), False, False, how) for how in (False, True))
    assert plan.main.meta["CHAINS"] == plan.behind.meta["CHAINS"] == chains and fast.main.meta["CHAINS"] == 1
    assert plan.sums * 128 == chains * q.numel() and plan.turns == 2 * chains * plan.blocks
    assert plan.before.meta["TURNS"] == 2 * chains and plan.behind.meta["LOOK"] >= (chains > 1)
