"""Timetables of the Hopper backward in order, without a mask: each visit has a place of its own, nobody waits for ever,
the GPU is full; and which problems have one."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from adatom.device import pretend
from adatom.ops.attention import limits
from adatom.ops.attention.api import inputs_of
from adatom.ops.attention.problem import problem

pytest.importorskip("triton.experimental.gluon")

from test_hopper import H100, as_python, blocks_of  # noqa: E402

from adatom.ops.attention import hopper_bwd as backward  # noqa: E402
from adatom.ops.attention import hopper_bwd_feed as feed  # noqa: E402


def timetable(len_q: int, len_k: int, block_m: int, each: int) -> list[list[tuple[int, int]]]:
    """Of each tile of a head, in the order in which they are taken, the blocks of queries that it visits, in turn, and
    its place in their sums."""
    of = dict.fromkeys(("LEFT", "RIGHT", "LENS", "VARLEN", "CUT", "UP", "ABREAST", "CROSSED", "DESCENDING"), False)
    of = SimpleNamespace(**of, BLOCK_M=block_m, SHIFTED=True, ALONE=False)
    neighbours, ends = as_python(feed.neighbours), as_python(feed.own_ends)
    place = as_python(feed.place_in_sum, neighbours=neighbours, APART=feed.APART.value)
    before_visits, visit = as_python(feed.before_visits, own_ends=ends), as_python(feed.visit, own_ends=ends)
    blocks_of_piece = as_python(
        feed.blocks_of_piece, piece_of=as_python(feed.piece_of), neighbours=neighbours, APART=feed.APART.value
    )
    piece_of, head_and_block = as_python(feed.piece_of), as_python(feed.head_and_block)
    tile_at = lambda b, hk, n0, *_: n0  # noqa: E731
    tile_of = as_python(feed.tile_of, piece_of=piece_of, head_and_block=head_and_block, tile_at=tile_at)
    counts = (1, 1, 1, 1, 1, len_q, len_k, None, None, (0, 0, 1, each))
    stride, tiles = math.ceil(len_q / block_m), []
    for t in range(math.ceil(len_k / 128)):
        n0 = tile_of(t, None, None, counts, of)
        begin, count = blocks_of(n0 // 128, len_q, len_k, -1, -1, None, block_m)
        begin, count = blocks_of_piece(0, n0, begin, count, counts, of)
        at, seen = before_visits(0, 0, begin, count, 1, stride, of), []
        for _ in range(count):
            at = m, h, block = visit(*at, 0, begin, count, 1, stride, of)
            assert (h, block) == (0, m)
            seen.append((m, place(m, n0, count, counts)))
        tiles.append(seen)
    return tiles


def rounds(tiles, heads: int, group: int, programs: int, shuffled: bool = False) -> int | None:
    """How many visits one behind the other it takes programs that take tiles by number, or None if all wait for ever;
    shuffled: programs run in any order, and what one adds the next sees at once."""
    order = [
        (h, iter(visits))
        for first in range(0, heads, group)
        for visits in tiles
        for h in range(first, min(first + group, heads))
    ]
    order.reverse()
    turns: dict[tuple[int, int], int] = defaultdict(int)
    running: list[list] = []
    for time in itertools.count():
        while order and len(running) < programs:
            h, visits = order.pop()
            running.append([h, visits, next(visits)])
        if not running:
            return time
        passed = []
        for walker in random.sample(running, len(running)) if shuffled else running:
            h, visits, (m, place) = walker
            if turns[h, m] == place:
                passed.append((h, m))
                turns[h, m] += shuffled
                walker[2] = next(visits, None)
        if not passed:
            return None
        for at in passed:
            turns[at] += not shuffled
        running = [walker for walker in running if walker[2] is not None]


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize(("len_q", "len_k"), [
    (1, 1), (64, 300), (300, 64), (960, 960), (1000, 1000), (1024, 1024), (2100, 400), (2100, 2100),
])  # fmt: skip
def test_a_timetable_has_each_visit_once_and_nobody_waits_for_ever(len_q, len_k, block_m, parts):
    """All tiles have places of their own in the sum of a block of queries, and programs in which all that run together
    find room come to an end, whatever order they run in."""
    random.seed(0)
    each = math.ceil(math.ceil(len_k / 128) / parts)
    tiles = timetable(len_q, len_k, block_m, each)
    places = defaultdict(list)
    for visits in tiles:
        assert sorted(m for m, _ in visits) == list(range(math.ceil(len_q / block_m)))
        for m, place in visits:
            places[m].append(place)
    assert all(sorted(found) == list(range(len(tiles))) for found in places.values())
    for programs in (each, each + 1, 2 * each + 1, 132):
        assert rounds(tiles, 5, min(5, programs // each), programs, shuffled=True)
    if each > 1:  # else nobody waits for a tile of a higher number
        assert rounds(tiles, 5, 1, each - 1) is None


def shift_of(batch, heads, length, causal=False, bias=None, kv_heads=None, dim=128, keys=None, **options):
    """(tiles of a head together, heads together) of an ordered backward on an H100 by a timetable, else None. bias: of
    so many queries."""
    keys = keys or length
    q, k, full = (
        torch.empty(batch, *size, dtype=torch.bfloat16, device="meta")
        for size in ((heads, length, dim), (kv_heads or heads, keys, dim), (heads, bias or 0, keys))
    )
    with pretend(H100):
        x, o, _ = inputs_of(q=q, k=k, v=k, bias=full if bias else None, causal=causal, **options)
        plan = backward._launches(x, o, q, q, (q, k, k), False, bias == 1, True)
    at, meta = dict(zip(plan.main.kernel.arg_names[18:], plan.main.scalars)), plan.main.meta
    if not meta["SHIFTED"]:
        return None
    assert meta["ONCE"] and meta["LOOPS"] == 1
    assert not any(meta[name] for name in ("UP", "ABREAST", "CROSSED", "CUT", "CLAIM", "RIGHT"))
    return at["together"], at["group"]


@pytest.mark.parametrize(("dim", "block_m", "many"), [(64, 128, 20), (128, 64, 28)])
def test_a_timetable_fills_the_gpu(dim, block_m, many):
    """Where one is used, tiles take hardly more visits than what a GPU that is always busy would take."""
    found = 0
    for batch, heads, length in itertools.product((1, 2), (2, 5, 8, 12, 16, 22), (1024, 2048, 3000, 4096, 8192)):
        shift = shift_of(batch, heads, length, dim=dim)
        if shift is not None:
            found += 1
            each, group = shift
            tiles = timetable(length, length, block_m, each)
            least = len(tiles[0]) * math.ceil(len(tiles) * batch * heads / 132)
            assert rounds(tiles, batch * heads, group, 132) <= 1.1 * least + 4
    assert found > many


def test_which_problems_have_a_timetable():
    assert shift_of(1, 8, 4096) == (32, 1)
    assert shift_of(1, 2, 32768) == (128, 1)
    assert shift_of(1, 5, 6400) == (25, 5)  # 50 tiles of one head leave 32 multiprocessors idle
    assert shift_of(1, 32, 4096, kv_heads=8) == (32, 1)
    assert shift_of(1, 16, 4096, bias=4096) == (32, 1)
    assert shift_of(2, 16, 2048, dim=64, bias=2048) == (8, 16)
    assert shift_of(1, 8, 4100) == (33, 1)  # the last begins at the last block, not two behind the one before
    assert shift_of(1, 16, 1024, keys=4096) == (8, 16)
    assert shift_of(1, 8, 8192, keys=2048) == (16, 1)
    assert shift_of(1, 16, 4096, dim=64) == (16, 8)
    assert shift_of(1, 3, 4096, dim=64) is None  # ranges of queries
    for options in (
        {"batch": 8}, {"length": 3072}, {"dim": 32}, {"window": (100, 100)}, {"causal": True, "heads": 8},
        {"window": (None, 5)}, {"bias": 1}, {"dim": 64, "batch": 2, "length": 2048},
        {"dim": 64, "heads": 32, "kv_heads": 8}, {"dim": 64, "heads": 8, "keys": 16384},
        {"kv_lens": torch.empty(1, dtype=torch.int32, device="meta")},
    ):  # fmt: skip
        assert shift_of(**{"batch": 1, "heads": 16, "length": 4096, **options}) is None, options


@pytest.mark.parametrize(("options", "heads"), [({"kv_lens": True}, 7), ({"softcap": 5.0}, 3), ({"bias": True}, 7)])
@pytest.mark.parametrize("dim", [64, 128])
def test_few_tiles_with_options_are_served_as_they_were_timed(options, heads, dim):
    """A convoy, as with lengths of keys, needs half as many tiles more than there are multiprocessors."""
    for n in (heads - 1, heads):
        q = torch.empty(1, n, 4096, dim, dtype=torch.bfloat16, device="meta")
        given = {
            "kv_lens": torch.empty(1, dtype=torch.int32, device="meta") if "kv_lens" in options else None,
            "bias": torch.empty(1, n, 4096, 4096, dtype=q.dtype, device="meta") if "bias" in options else None,
        }
        with pretend(H100):
            x, o, _ = inputs_of(q=q, k=q, v=q, softcap=options.get("softcap", 0.0), **given)
            assert (limits.hopper_bwd_ordered(problem(x, o)) is None) == (n == heads)
