"""The ways of the Hopper backward: who multiplies dQ, who claims, which tiles are cut, which blocks are masked."""

from __future__ import annotations

import dataclasses
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

from test_hopper import EDGE, H100, as_python, blocks_of  # noqa: E402

from adatom.ops.attention import hopper_bwd as backward  # noqa: E402
from adatom.ops.attention import hopper_bwd_cut as cut  # noqa: E402
from adatom.ops.attention import hopper_bwd_feed as feed  # noqa: E402
from adatom.ops.attention import hopper_bwd_tiles as bwd_tiles  # noqa: E402
from adatom.tiles import hopper  # noqa: E402


@pytest.mark.parametrize("sharing", [0, 1, 3])
@pytest.mark.parametrize("blocks", [5, 32, 33])
@pytest.mark.parametrize(("heads", "group", "n_blocks", "programs"), [(3, 1, 2, 4), (10, 4, 7, 9), (10, 4, 7, 132)])
def test_what_is_left_of_the_last_round_is_cut_into_pieces(heads, group, n_blocks, programs, blocks, sharing):
    """Tiles and pieces visit each block of queries of each head once, and a tile that is cut is all in pieces.
    sharing 0: known to be one head."""
    alone, sharing = not sharing, sharing or 1
    tile_of, piece_of = as_python(feed.head_and_block), as_python(feed.piece_of)
    blocks_of_piece = as_python(feed.blocks_of_piece, piece_of=piece_of)
    before_visits = as_python(feed.before_visits, before_first=as_python(feed.before_first))
    visit = as_python(feed.visit, step=as_python(feed.step))
    of = dict.fromkeys(("UP", "ABREAST", "CROSSED", "SHIFTED", "LEFT", "RIGHT", "LENS", "VARLEN"), False)
    plan = SimpleNamespace(ALONE=alone, CUT=True, **of)
    rest = heads * n_blocks % programs
    pieces, whole = cut.pieces_of(rest, blocks, sharing, programs), heads * n_blocks - rest
    counts = (None, (whole + rest * pieces, whole, pieces, 0))
    seen = defaultdict(list)
    for t in range(whole + rest * pieces):
        tile, _ = piece_of(t, counts, plan)
        begin, count = blocks_of_piece(t, 0, 0, blocks, counts, plan)
        assert count > 0
        assert (count < blocks) == (t >= whole and pieces > 1)
        head, block = tile_of(tile, n_blocks, heads, group)
        at = before_visits(head, head * sharing * blocks, begin, count, sharing, blocks, plan)
        for _ in range(count * sharing):
            at = m, h, place = visit(*at, head, begin, count, sharing, blocks, plan)
            assert place == h * blocks + m
            seen[head, block].append((m, h - head * sharing))
    everything = sorted(itertools.product(range(blocks), range(sharing)))
    assert set(seen) == set(itertools.product(range(heads), range(n_blocks)))
    assert all(sorted(found) == everything for found in seen.values())


def test_tiles_are_cut_where_that_ends_sooner():
    """4 tiles of 64 blocks of queries are those of most shapes at 132 multiprocessors: 4,096 are 31 rounds and 4."""
    assert cut.pieces_of(0, 64, 1, 132) == 1
    assert 8 <= cut.pieces_of(4, 64, 1, 132) <= 32
    assert cut.pieces_of(131, 64, 1, 132) == 1
    for tiles, blocks in itertools.product(range(1, 132), (1, 2, 5, 16, 64, 300)):
        pieces = cut.pieces_of(tiles, blocks, 1, 132)
        each = math.ceil(blocks / pieces)
        assert (pieces - 1) * each < blocks
        assert math.ceil(tiles * pieces / 132) * each <= blocks


def test_which_way_a_plan_goes():
    """Pieces are claimed but where tiles are taken by number, or, for a third warpgroup, the sum is cleared. Up: under
    a causal mask, but in order at head_dim 128 where heads share keys: those go abreast; nor in order beside a full
    bias, or where tiles are few: heads then share no keys. A third warpgroup: at head_dim 128 if it is long, sooner in
    order; out of order its last tiles are cut without a mask. Blocks without a mask apart from others: under a causal
    one, there if it is long."""
    flags = itertools.product((32, 64, 96, 128), (1024, 4096, 8192), ("none", "key", "full"), *[(False, True)] * 3)
    for dim, length, bias, causal, ordered, shared in flags:
        q = torch.empty(2, 40, length, dim, dtype=torch.bfloat16, device="meta")
        k = q[:, ::4] if shared else q
        shape = (2, 40, length if bias == "full" else 1, length)
        given = None if bias == "none" else torch.empty(shape, dtype=torch.bfloat16, device="meta")
        with pretend(H100):
            x, o, _ = inputs_of(q=q, k=k, v=k, causal=causal, bias=given)
            before, main = backward._launches(x, o, q, q, (q, k, k), False, False, ordered)[1:3]
        plan = feed.Plan(**{field.name: main.meta[field.name] for field in dataclasses.fields(feed.Plan)})
        assert before.meta["SUM"] == (not (plan.FIRST or plan.INSIDE))
        plain, long = bias == "none", length >= 4096
        alone = not shared or not long and (dim == 64 or dim > 64 and ordered)
        third = dim > 64 and plain and (long or ordered and not causal)
        assert plan.ABREAST == (causal and dim > 64 and ordered and not alone)
        up = causal and dim > 32 and (long or not ordered and dim > 64 and not shared)
        assert plan.UP == (up and not plan.ABREAST and not (ordered and bias == "full" and alone))
        assert plan.DESCENDING == (plan.UP and ordered)
        assert plan.THIRD == third and plan.ALONE == (third and not (shared or ordered))
        inside = dim == 32 and length <= 512 and not shared
        assert plan.LOOPS == (2 if plain and causal and (dim <= 64 or long) and not inside else 1)
        assert plan.CUT <= (plan.THIRD and not (causal or ordered))
        assert plan.CLAIM <= plan.FIRST and plan.UP <= (plan.CLAIM or ordered or plan.THIRD)
        assert plan.CLAIM or plan.DYNAMIC or plan.ORDERED or not plan.FIRST  # who waits is not before whom it waits for
        assert not (plan.ORDERED and plan.CLAIM)
        assert plan.FIRST or plan.THIRD or dim > 64 and not causal and bias == "key"
        if third:  # in order it works on one tile, and consumers have fewer registers
            assert plan.FIRST == ordered <= plan.ONCE and plan.UP == (causal and not plan.ABREAST) and plan.STAGES == 3
            assert main.meta["REGISTERS"] == (208 if ordered else 216)
        assert main.blocks[main.kernel.arg_names.index("DQ")] == (min(plan.D, 64) // 2, 128)


@pytest.mark.parametrize(("lengths", "options", "third"), [
    ((1024, 1536), {}, True), ((1536, 1024), {"sinks": True}, True), ((1023, 4096), {}, False),
    ((1535, 1535), {}, False), ((4096, 4096), {"causal": True}, True), ((4095, 8192), {"causal": True}, False),
    ((3000, 3000), {"causal": True, "shared": True}, True), ((2999, 8192), {"causal": True, "shared": True}, False),
    ((4096, 4096), {"window": (None, 100)}, True), ((4096, 4096), {"window": (100, None)}, False),
    ((4096, 4096), {"window": (100, 100)}, False), ((4097, 4096), {"causal": True}, False),
    ((4096, 4096), {"softcap": 5.0}, False), ((4096, 4096), {"softcap": 5.0, "causal": True}, False),
    ((4096, 4096), {"kv_lens": True}, False), ((4096, 4096), {"packed": True}, False),
    ((4096, 4096), {"bias": (1, 1, 1, 4096)}, False), ((1024, 1024), {"ordered": True}, True),
    ((1023, 4096), {"ordered": True}, False), ((4096, 2048), {"ordered": True, "causal": True}, False),
    ((2048, 2048), {"ordered": True, "causal": True, "shared": True}, True),
    ((2047, 2047), {"ordered": True, "causal": True, "shared": True}, False),
    ((4096, 4096), {"dim": 64}, False), ((4096, 4096), {"dim": 72}, True),
])  # fmt: skip
def test_when_a_third_warpgroup_multiplies_dq(lengths, options, third):
    """Not beside what it does not do, nor where that was no faster."""
    given = {name: options[name] for name in ("causal", "window", "softcap") if name in options}
    (len_q, len_k), dim = lengths, options.get("dim", 128)

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    shapes = [(4, 8, len_q, dim), *[(4, 4 if "shared" in options else 8, len_k, dim)] * 2]
    if "packed" in options:
        shapes = [(n, h, d) for _, h, n, d in shapes]
        given |= {name: empty(3, dtype=torch.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    q, k, v = (empty(*shape) for shape in shapes)
    if "kv_lens" in options:
        given["kv_lens"] = empty(4, dtype=torch.int32)
    if "sinks" in options:
        given["sinks"] = empty(8, dtype=torch.float32)
    if "bias" in options:
        given["bias"] = empty(*options["bias"])
    with pretend(H100):
        x, o, _ = inputs_of(q=q, k=k, v=v, **given)
        plan = backward._launches(x, o, q, q, (q, k, v), False, False, "ordered" in options)
    assert plan.main.meta["THIRD"] == third
    if third and "ordered" not in options:
        given = dict(zip(plan.main.kernel.arg_names[18:], plan.main.scalars))
        assert plan.before.meta["SUM"] and given["together"] == 0  # on which it relies


@pytest.mark.parametrize("window", [(300, 0), (300, 300), (None, 0), (300, None)])
@pytest.mark.parametrize("dim", [64, 128])
def test_sums_in_order_go_upwards_where_there_is_an_edge_to_the_right(dim, window):
    q = torch.empty(20, 12, 1000, dim, dtype=torch.bfloat16, device="meta")
    with pretend(H100):
        x, o, _ = inputs_of(q=q, k=q, v=q, window=window)
        fast, ordered = (backward._launches(x, o, q, q, (q, q, q), False, False, how).main for how in (False, True))
    causal = window == (None, 0)
    assert ordered.meta["UP"] == (causal or dim == 128 and window[1] is not None)
    assert fast.meta["UP"] == (causal and dim == 128)


@pytest.mark.parametrize(("batch", "heads", "length", "causal", "up", "group"), [
    (8, 16, 4096, False, False, 4), (32, 16, 1024, False, False, 16), (1, 16, 4096, False, False, 16),
    (2, 16, 4096, False, False, 8), (2, 12, 4096, False, False, 12), (1, 4, 16384, False, False, 4),
    (1, 13, 1000, False, False, 13), (2, 13, 16384, False, False, 2), (1, 20, 4096, True, False, 20),
    (1, 16, 1024, True, False, 16), (1, 13, 2048, True, False, 13), (8, 16, 2048, True, True, 16),
    (8, 16, 4096, True, True, 8), (1, 8, 32768, True, True, 1), (1, 23, 4096, True, False, 23),
    (2, 24, 4096, True, True, 12),
])  # fmt: skip
def test_groups_of_heads_in_order_are_equal_and_larger_where_tiles_are_few(batch, heads, length, causal, up, group):
    """And the longest tiles of few heads come first there, though they are under a causal mask. All without a
    timetable: without a mask with lengths of keys."""
    q = torch.empty(batch, heads, length, 128, dtype=torch.bfloat16, device="meta")
    lens = None if causal else torch.empty(batch, dtype=torch.int32, device="meta")
    with pretend(H100):
        x, o, _ = inputs_of(q=q, k=q, v=q, causal=causal, kv_lens=lens)
        main = backward._launches(x, o, q, q, (q, q, q), False, False, True).main
    assert main.meta["UP"] == up and not main.meta["SHIFTED"]
    assert dict(zip(main.kernel.arg_names[18:], main.scalars))["group"] == group


@pytest.mark.parametrize(("batch", "heads", "length", "dim", "options", "group"), [
    (2, 16, 2048, 64, {}, 32), (4, 16, 2048, 64, {}, 32), (8, 16, 1024, 64, {}, 43), (4, 12, 1024, 64, {}, 48),
    (1, 10, 8192, 64, {}, 10), (3, 16, 2048, 64, {}, 48), (5, 16, 1024, 64, {}, 40), (8, 16, 2048, 64, {}, None),
    (8, 16, 2048, 64, {"softcap": 9.0}, 32),
    (8, 16, 2048, 128, {"softcap": 9.0}, 32), (8, 16, 2048, 64, {"bias": 2048}, 32),
    (4, 10, 3000, 64, {"bias": 3000}, 40), (2, 16, 4096, 128, {"bias": 4096}, 32),
    (4, 16, 4096, 128, {"kv_lens": True}, 32), (8, 12, 1024, 128, {}, 32), (0, 16, 64, 64, {"bias": 64}, 1),
])  # fmt: skip
def test_heads_whose_longest_tiles_come_first_go_in_equal_groups(batch, heads, length, dim, options, group):
    """In order under a causal mask, walking downwards: so many that those of a head hardly wait for each other."""
    q = torch.empty(batch, heads, length, dim, dtype=torch.bfloat16, device="meta")
    if "bias" in options:
        options = {"bias": torch.empty(heads, length, length, dtype=torch.bfloat16, device="meta")}
    if "kv_lens" in options:
        options = {"kv_lens": torch.empty(batch, dtype=torch.int32, device="meta")}
    with pretend(H100):
        x, o, _ = inputs_of(q=q, k=q, v=q, causal=True, **options)
        main = backward._launches(x, o, q, q, (q, q, q), False, False, True).main
    assert main.meta["UP"] == (group is None) and not main.meta["SHIFTED"]
    if group is not None:
        assert dict(zip(main.kernel.arg_names[18:], main.scalars))["group"] == group


@pytest.mark.parametrize(("batch", "length", "dim", "splits", "in_order"), [
    (2, 4096, 64, 4, 8), (4, 4096, 64, 4, 4), (4, 2048, 64, 8, 8), (8, 2048, 64, 4, 4), (2, 4096, 128, 2, 2),
    (1, 2048, 128, 4, 8), (1, 4096, 128, 2, 2),
])  # fmt: skip
def test_few_heads_share_no_keys_under_a_causal_mask(batch, length, dim, splits, in_order):
    """At head_dim 64 where there are fewer than 16 tiles for each of 132 multiprocessors; if they are long, in order.
    Beyond that fewer than six in order; out of order as few share them as fill the GPU twice."""
    q, k = (torch.empty(batch, n, length, dim, dtype=torch.bfloat16, device="meta") for n in (32, 4))
    with pretend(H100):
        x, o, _ = inputs_of(q=q, k=k, v=k, causal=True)
        found = [backward._launches(x, o, q, q, (q, k, k), False, False, ordered).splits for ordered in (False, True)]
    assert found == [splits, in_order]


@pytest.mark.parametrize(("heads", "kv_heads", "length", "dim", "each"), [
    (4, 1, 8192, 128, 1), (8, 2, 8192, 128, 2), (12, 3, 4096, 128, 1), (12, 4, 8192, 128, 3), (32, 8, 4096, 128, 4),
    (16, 2, 2048, 128, 1), (4, 1, 8192, 64, 1), (8, 2, 8192, 64, 2), (8, 2, 8192, 32, 1), (8, 8, 8192, 128, 1),
])  # fmt: skip
def test_as_few_heads_share_keys_under_a_causal_mask_as_fill_the_gpu_twice(heads, kv_heads, length, dim, each):
    """Out of order: the longest tiles have twice the average. To head_dim 32 none share them. A row that splits is
    served."""
    q, k = (torch.empty(1, n, length, dim, dtype=torch.bfloat16, device="meta") for n in (heads, kv_heads))
    with pretend(H100):
        x, o, _ = inputs_of(q=q, k=k, v=k, causal=True)
        plan = backward._launches(x, o, q, q, (q, k, k), False, False, False)
        assert limits.hopper_bwd(problem(x, o)) is None
    assert plan.splits * each * kv_heads == heads


def test_half_as_many_heads_go_together_beside_a_bias_and_head_dim_64_has_larger_blocks():
    q, bias = (torch.empty(2, 16, 4096, n, dtype=torch.bfloat16, device="meta") for n in (128, 4096))
    lens = torch.empty(2, dtype=torch.int32, device="meta")
    groups = []
    for dim, given in ((128, None), (128, bias), (64, None)):
        with pretend(H100):
            x, o, _ = inputs_of(q=q[..., :dim], k=q[..., :dim], v=q[..., :dim], bias=given, kv_lens=lens)
            main = backward._launches(x, o, q, q, (q, q, q), False, False, True).main
        groups.append(dict(zip(main.kernel.arg_names[18:], main.scalars))["group"])
    assert groups == [8, 4, 8]


def test_heads_that_share_keys_go_abreast_but_under_windows_or_beside_sums_over_queries():
    """Whose end is that of a head's last block: a gradient of a bias per key."""
    q, bias = (torch.empty(16, 8, n, d, dtype=torch.bfloat16, device="meta") for n, d in ((1000, 128), (1, 1000)))
    lens, k = torch.empty(16, dtype=torch.int32, device="meta"), q[:, ::4]
    for options, up, abreast in (
        ({"causal": True}, False, True), ({"causal": True, "kv_lens": lens}, False, True),
        ({"window": (300, 0)}, True, False), ({"causal": True, "bias": bias}, True, False),
    ):  # fmt: skip
        with pretend(H100):
            x, o, _ = inputs_of(q=q, k=k, v=k, **options)
            meta = backward._launches(x, o, q, q, (q, k, k), False, True, True).main.meta
        assert (meta["UP"], meta["ABREAST"], meta["SUMS"]) == (up, abreast, "bias" in options)


def test_loops_and_walks_of_packed_and_ragged_problems():
    """Under a causal mask two loops; windows three, with a softcap one; at head_dim 64 one with any softcap; upwards at
    head_dim 128 whoever visits."""
    cu = torch.tensor([0, 700, 1500], dtype=torch.int32, device="meta")
    lens = torch.empty(2, dtype=torch.int32, device="meta")
    for dim, how, ordered, softcap in itertools.product(
        (64, 128), ("packed", "lens", "more"), (False, True), (None, 3.0)
    ):
        for options in ({"causal": True}, {"window": (300, 0)}, {"window": (300, None)}):
            shape = (1500, 4, dim) if how == "packed" else (2, 4, 750 if how == "more" else 700, dim)
            q = torch.empty(shape, dtype=torch.bfloat16, device="meta")
            k = q[:, :, :700] if how == "more" else q
            given = {"packed": {"cu_seqlens_q": cu, "cu_seqlens_k": cu}, "lens": {"kv_lens": lens}}.get(how, {})
            with pretend(H100):
                x, o, _ = inputs_of(q=q, k=k, v=k, softcap=softcap, **given, **options)
                main = backward._launches(x, o, q, q, (q, k, k), False, False, ordered).main
            plan = feed.Plan(**{field.name: main.meta[field.name] for field in dataclasses.fields(feed.Plan)})
            window = options.get("window")
            spills = softcap is not None and dim == 64
            assert plan.LOOPS == (1 if spills else 2 if window is None else 3 if window[1] == 0 and not softcap else 1)
            assert plan.UP == (window is None and dim == 128 and not ordered)
            assert plan.CLAIM != plan.ORDERED and plan.FIRST


@pytest.mark.parametrize("shape", EDGE)
def test_sums_by_descending_keys(shape):
    """Where a plan says so, tiles come by descending keys, and who adds first to a block of queries has no keys behind
    that see it."""
    len_q, len_k, left, right, _, block_m = shape
    n_n, heads = math.ceil(len_k / 128), 3
    plan = SimpleNamespace(DESCENDING=True, CROSSED=False, VARLEN=False, CUT=False, LENS=False, BLOCK_M=block_m)
    tile_of = as_python(
        feed.tile_of,
        piece_of=as_python(feed.piece_of),
        head_and_block=as_python(feed.head_and_block),
        tile_at=lambda b, hk, n0, Lens, counts, PLAN: (b * heads + hk, n0 // 128),
    )
    counts = (heads, heads, heads, 2, 1, len_q, len_k, left, right, None)
    found = [tile_of(t, None, None, counts, plan) for t in range(n_n * heads)]
    assert sorted(found) == sorted(itertools.product(range(heads), range(n_n)))
    for head in range(heads):
        assert [j for h, j in found if h == head] == list(reversed(range(n_n)))
    for j in range(n_n):
        begin, count = blocks_of(j, *shape)
        behind, _ = blocks_of(j + 1, *shape)
        for m in range(begin, begin + count):
            seen = [i for i in range(j + 1, n_n) if 0 <= m - blocks_of(i, *shape)[0] < blocks_of(i, *shape)[1]]
            assert (j == n_n - 1 or m < behind) == (not seen)


@pytest.mark.parametrize("seed", range(60))
def test_a_third_warpgroup_loads_and_multiplies_in_time(seed):
    """As hopper_bwd_third.py goes, over tiles of some visits each: it finds dS of both consumers, nobody writes what is
    read, dK and dV leave by way of dQ's memory when nothing is added from there, and all come to an end."""
    random.seed(seed)
    tiles = [random.choice((1, 1, 2, 3, 5, 8)) for _ in range(seed % 3 + 1)]
    arrived, wrote, loaded, at = [0, 0], {}, {}, [-1, -1]
    freed, keys, added, stored, released = [0], [-1], [0], [0], [0]

    def consumer(c: int):
        n = 0
        for tile, visits in enumerate(tiles):
            while keys[0] != tile:
                yield
            for _ in range(visits):
                while loaded.get(n % 3) != n:
                    yield
                at[c] = n  # and done with the one before
                yield
                while freed[0] < n - 1:
                    yield
                wrote[n % 2, c] = n
                yield
                assert arrived[n % 2] < n // 2 * 2 + 2  # nobody has come to this barrier for a later visit
                arrived[n % 2] += 1
                yield
                assert loaded[n % 3] == n and keys[0] == tile  # which dK is multiplied from
                n += 1
            at[c] = n
            released[0] += 1
            while added[0] <= tile:
                yield
            yield  # dV and dK leave
            assert added[0] == tile + 1
            stored[0] += 1  # ahead of the next dS

    def third():
        n = 0
        for tile, visits in enumerate(tiles):
            while released[0] < 2 * tile:
                yield
            keys[0] = tile
            for ahead in range(min(2, visits)):
                loaded[(n + ahead) % 3] = n + ahead
            for j in range(visits):
                while arrived[n % 2] < n // 2 * 2 + 2:
                    yield
                assert wrote[n % 2, 0] == wrote[n % 2, 1] == n
                if j + 2 < visits:
                    assert min(at) >= n
                    loaded[(n + 2) % 3] = n + 2
                assert stored[0] == 2 * tile  # before it writes where dK and dV of the tile before left
                yield
                assert wrote[n % 2, 0] == wrote[n % 2, 1] == n
                freed[0] = n = n + 1
                yield
            added[0] += 1

    running = [consumer(0), consumer(1), third()]
    for _ in range(400 * sum(tiles)):
        if running and next(which := random.choice(running), "end") == "end":
            running.remove(which)
    assert not running and stored[0] == 2 * len(tiles)


@pytest.mark.parametrize("seed", range(60))
def test_in_order_a_third_warpgroup_multiplies_in_time(seed):
    """As `third_in_order` and who goes with it do, however long an addition waits for its turn: each finds what it
    reads, nobody comes to a named barrier anew before all have left it, and dK and dV take the keys' memory last."""
    random.seed(seed)
    visits = random.choice((1, 2, 3, 4, 9))
    everybody = {"consumer 0", "consumer 1", "third", "producer"}
    came, met, loaded, wrote = [set(), set()], [0, 0], {}, {}
    freed, piece, full, emptied, stored = [0, 0], [None, None], [0, 0], [0, 0], [0]

    def wait(count: list[int], i: int, phase: int):
        """As a barrier in memory of which so many phases are over: it knows only whether they are even."""
        while count[i] % 2 == phase % 2:
            yield

    def come(n: int, who: str):
        assert who not in came[n % 2] and met[n % 2] == n // 2
        came[n % 2].add(who)
        if came[n % 2] == everybody:
            came[n % 2].clear()
            met[n % 2] += 1

    def sync(n: int, who: str):
        come(n, who)
        while met[n % 2] <= n // 2:
            yield

    def consumer(c: int):
        for n in range(visits):
            while loaded.get(n % 3) != n:
                yield
            assert not stored[0]  # S reads keys
            yield
            yield from wait(freed, n % 2, n // 2 - 1)
            wrote[n % 2, c] = n
            yield
            come(n, f"consumer {c}")
            yield
            assert loaded[n % 3] == n
        yield from wait(freed, (visits - 1) % 2, (visits - 1) // 2)
        stored[0] += 1

    def producer():
        for n in range(visits):
            if n > 1:
                yield from sync(n - 2, "producer")
            loaded[n % 3] = n
            yield
        for n in range(max(visits - 2, 0), visits):
            yield from sync(n, "producer")

    def third():
        for n in range(visits):
            yield from sync(n, "third")
            for half in (0, 1):
                assert wrote[n % 2, 0] == wrote[n % 2, 1] == n and not stored[0]
                yield
                if half == 1:
                    freed[n % 2] += 1
                yield from wait(emptied, half, n - 1)
                assert full[half] == emptied[half] == n
                piece[half] = n
                full[half] += 1

    def adder(half: int):
        for n in range(visits):
            yield from wait(full, half, n)
            while random.random() < 0.8:
                yield
            assert piece[half] == n
            emptied[half] += 1

    running = [consumer(0), consumer(1), producer(), third(), adder(0), adder(1)]
    for _ in range(1000 * visits):
        if running and next(which := random.choice(running), "end") == "end":
            running.remove(which)
    assert not running and stored[0] == 2


EDGES = [
    (lengths, left, right, way)
    for lengths in ((640, 640), (300, 1024), (1000, 384), (100, 128), (555, 700))
    for left in (-1, 0, 2, 100, 300)
    for right in (0, 2, 300)
    for way in ("down", "up", "abreast")
] + [((n, n), -1, 0, "crossed") for n in (128, 300, 640, 960)]


@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize(("lengths", "left", "right", "way"), EDGES)
def test_blocks_in_the_loop_without_a_mask_need_none(lengths, left, right, block_m, way):
    """A tile's visits are in two loops, under a window in three, as `visits_of` counts them; of those that only the
    edge to the left may cut, the other cuts none."""
    len_q, len_k = lengths
    crossed = way == "crossed"
    of = SimpleNamespace(
        LEFT=left >= 0, RIGHT=True, LENS=False, VARLEN=False, CUT=False, EVEN_N=len_k % 128 == 0, BLOCK_M=block_m,
        UP=way == "up", ABREAST=way == "abreast", SHIFTED=False, CROSSED=crossed, ALONE=False,
        LOOPS=3 if left >= 0 or crossed else 2,
    )  # fmt: skip
    blocks_of = as_python(feed.blocks_of, blocks_of_queries=as_python(hopper.blocks_of_queries))
    up = as_python(feed.upwards)
    ends = as_python(feed.own_ends, upwards=up)
    before_visits = as_python(feed.before_visits, before_first=as_python(feed.before_first), own_ends=ends)
    visit = as_python(feed.visit, step=as_python(feed.step), own_ends=ends, upwards=up)
    visits = as_python(bwd_tiles.visits_of, cuts_of=bwd_tiles.cuts_of, upwards=up)
    stride, sharing = math.ceil(len_q / block_m), 3 if of.ABREAST else 1
    for n0 in range(0, len_k, 128):
        ragged = n0 + 128 > len_k
        span = begin, *_, count = blocks_of(n0, len_q, len_k, left, right, of)
        at, seen = before_visits(0, 0, begin, count, sharing, stride, of), []
        for kind in range(of.LOOPS):
            cuts = bwd_tiles.cuts_of(kind, of)
            for _ in range(visits(kind, span, ragged, of) * sharing):
                at = visit(*at, 0, begin, count, sharing, stride, of)
                seen.append(at[0])
                queries = range(at[0] * block_m, min((at[0] + 1) * block_m, len_q))
                first, last = (i + len_k - len_q for i in (queries[0], queries[-1]))
                assert cuts == "right" or not ragged and n0 + 127 <= first + right
                assert cuts != "none" or left < 0 or last - left <= n0
        wanted = [m for m in range(begin, begin + count) for _ in range(sharing)]
        assert seen == wanted[:: 1 if of.UP or crossed and up(begin, of) else -1]


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize(("left", "right"), [(-1, -1), (-1, 0), (-1, 77), (200, 0), (30, 77), (3, 2)])
@pytest.mark.parametrize("lengths", [(640, 640), (300, 1000), (1000, 300)])
def test_masks_without_a_branch(lengths, left, right, block):
    """Numbers that split a query's place in two mask what the query does not see; blocks that lie behind the edge to
    the right, by the edge to the left alone."""
    len_q, len_k = lengths
    tensors = SimpleNamespace(
        arange=lambda begin, end, layout: torch.arange(begin, end),
        SliceLayout=lambda *_: None,
        where=lambda seen, *_: seen,
    )
    masked, edges = as_python(bwd_tiles.masked, gl=tensors, HALF=64), as_python(bwd_tiles.edges_of, HALF=64)
    scores = SimpleNamespace(type=SimpleNamespace(layout=None), shape=[64, block])
    plan = SimpleNamespace(EVEN_N=len_k % 128 == 0, LEFT=left >= 0, RIGHT=right >= 0)
    for n0, c, row in itertools.product(range(0, len_k, 128), (0, 1), range(0, len_q, block)):
        key = torch.arange(64)[:, None] + n0 + c * 64
        at = torch.arange(block) + row + len_k - len_q
        of = edges(n0, len_q, len_k, left, right, c)
        got = masked(scores, row, of, "any", plan)
        if right < 0 and plan.EVEN_N:
            assert got is scores
            continue
        wanted = (key < len_k) & ((key <= at + right) | (right < 0)) & ((key >= at - left) | (left < 0))
        assert torch.equal(got.expand(64, block), wanted)
        if left >= 0 and bool((key <= at + right).all()) and n0 + 128 <= len_k:
            assert torch.equal(masked(scores, row, of, "left", plan).expand(64, block), wanted)


def circle(programs, ahead):
    """Whether programs that claim pieces can come to wait for each other, in any order of events. Each has tiles of
    (head, blocks visited), and for each of two consumers a warp that adds its pieces."""
    visits = [[(head, m, j) for head, blocks in tiles for j, m in enumerate(blocks)] for tiles in programs]
    who = list(itertools.product(range(len(programs)), range(2)))
    # of each warp the pieces it was given, those it added, whether it claimed the next; of all the claims
    start = ((0, 0, False),) * len(who), frozenset()
    reached, left = {start}, [start]
    while left:
        warps, claims = left.pop()
        after = []
        for i, (p, c) in enumerate(who):
            given, added, claimed = warps[i]
            if given < len(visits[p]) and given == added and warps[i ^ 1][0] >= given:  # consumers exchange dS
                after.append(((*warps[:i], (given + 1, added, claimed), *warps[i + 1 :]), claims))
            if added == len(visits[p]):
                continue
            head, m, j = visits[p][added]
            owners = {owner: passed for piece, owner, passed in claims if piece == (head, m, c)}
            if claimed and given > added:
                done = frozenset((piece, o, passed or (piece, o) == ((head, m, c), p)) for piece, o, passed in claims)
                after.append(((*warps[:i], (given, added + 1, False), *warps[i + 1 :]), done))
            elif not claimed and (j >= ahead or given > added) and all(owners.values()):
                taken = claims if owners else claims | {((head, m, c), p, False)}
                after.append(((*warps[:i], (given, added, True), *warps[i + 1 :]), taken))
        if not after and any(added < len(visits[p]) for (p, _), (_, added, _) in zip(who, warps)):
            return True
        left += set(after) - reached
        reached |= set(after)
    return False


def test_who_claims_pieces_never_waits_in_a_circle():
    """Two programs of which each goes to the head that the other comes from, with tiles that begin at any block."""
    tiles = [tuple(range(begin, 3)) for begin in range(3)]
    found = set()
    for a, b, c, d in itertools.product(tiles, repeat=4):
        if a != d and b != c and (a, b) <= (c, d):  # no tile is two programs'; programs may change places
            programs = ((0, a), (1, b)), ((1, c), (0, d))
            found |= {ahead for ahead in range(feed.AHEAD.value + 1) if ahead not in found and circle(programs, ahead)}
    assert found == set(range(feed.AHEAD.value))


@pytest.mark.parametrize("size", [(500, 3, 64), (1, 3, 40), (7, 1, 128)])
def test_boxes_of_packed_tensors_end_with_a_sequence(size):
    """Rows of a sequence are inside of its descriptor and at their address, in 64 bits; the others are outside."""
    x = torch.empty(size[0], 2 * size[1], size[2], dtype=torch.bfloat16)[:, ::2]
    desc = hopper.descriptor(hopper.sequences(x), (128, 128))
    box = SimpleNamespace(block_type=SimpleNamespace(shape=desc.block_shape))
    box_at = as_python(hopper.box_at, END=hopper.END.value)
    for begin, end in ((0, size[0]), (0, 0), (size[0] // 2, size[0]), (size[0] // 3, size[0] // 3 + 1)):
        for h, row in itertools.product(range(size[1]), (0, 64, 128, 384, 512)):
            at = box_at(box, (begin, end - begin), h, row, 8)
            assert all(0 <= place < 2**31 for place in at)
            assert all(place < n for i, (place, n) in enumerate(zip(at, desc.shape)) if i != 3)
            inside = max(0, min(128, desc.shape[3] - at[3]))
            assert inside == max(0, min(128, end - begin - row))
            address = 2 * sum(place * stride for place, stride in zip(at, desc.strides)) % 2**64
            if inside:
                assert address == 2 * ((begin + row) * x.stride(0) + h * x.stride(1) + 8)
