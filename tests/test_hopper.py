"""How the Hopper kernels are tiled, balanced and ordered: what can be worked out on the host, for an invented H100."""

from __future__ import annotations

import builtins
import inspect
import itertools
import math
import os
import random
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import FunctionType, SimpleNamespace

import pytest
import torch

from adatom.device import Device, pretend
from adatom.ops.attention import limits
from adatom.ops.attention.api import inputs_of
from adatom.ops.attention.problem import problem

pytest.importorskip("triton.experimental.gluon")

from adatom.ops.attention import hopper_bwd as backward  # noqa: E402
from adatom.ops.attention import hopper_bwd_bias as bias_pass  # noqa: E402
from adatom.ops.attention import hopper_bwd_feed as feed  # noqa: E402
from adatom.ops.attention import hopper_fwd_plan as plan  # noqa: E402
from adatom.ops.attention.triton_call import Call  # noqa: E402
from adatom.tiles import hopper  # noqa: E402

H100 = Device("cuda", 90, 132, 232448)


def call_of(dims=(64, 64), lengths=(1024, 1024), batch=8, heads=8, **options) -> Call:
    """What the launcher sees of a call; its tensors have no memory."""
    q, k, v = (
        torch.empty(batch, heads, n, d, dtype=torch.bfloat16, device="meta")
        for n, d in zip((*lengths, lengths[1]), (dims[0], *dims))
    )
    with pretend(H100):
        x, o, _ = inputs_of(q=q, k=k, v=v, **options)
        return Call(x, o)


@pytest.mark.parametrize("dtype", [None, torch.bool, torch.bfloat16, torch.float32])
def test_buffers_fit_in_shared_memory(dtype):
    """For every head_dim, bias and length there is a tile with at least one buffer of each kind."""
    for dim, dim_v, length in itertools.product((16, 32, 64, 128, 256), (16, 64, 128, 256), (256, 2048, 20000)):
        options = {} if dtype is None else {"bias": torch.empty(1, 1, length, length, dtype=dtype, device="meta")}
        for causal in (False, True):
            call = call_of((dim, dim_v), (length, length), causal=causal, **options)
            config = plan.pick(call, (dim, dim_v))
            stages = plan.stages(config, call, (dim, dim_v))
            if not stages[0]:
                config = config._replace(block_n=config.block_n // 2)
                stages = plan.stages(config, call, (dim, dim_v))
            assert min(stages) >= 1, (dim, dim_v, length, causal, dtype)


@pytest.mark.parametrize("left", [None, 300])
@pytest.mark.parametrize("lengths", [(512, 512), (777, 1000), (2048, 2048), (3000, 500), (4096, 4096)])
def test_the_model_of_the_balance(lengths, left):
    """`imbalance` is what walking through the tiles one by one gives."""
    call = call_of((128, 128), lengths, batch=4, heads=7, causal=True, window=(left, None))
    config = plan.pick(call, (128, 128))
    rows, n_blocks = 128, math.ceil(lengths[0] / 128)
    for group in (1, 3, 28):
        tiles = []
        for first in range(0, 28, group):
            for block in reversed(range(n_blocks)):
                end = min(lengths[1], (block + 1) * rows + lengths[1] - lengths[0])
                begin = 0 if left is None else max(0, block * rows + lengths[1] - lengths[0] - left)
                blocks = max(math.ceil(end / config.block_n), 1) - begin // config.block_n
                tiles += [blocks + 1] * min(group, 28 - first)
        load = [0] * H100.sms
        for t, cost in enumerate(tiles):
            turn, place = divmod(t, H100.sms)
            load[H100.sms - 1 - place if turn % 2 else place] += cost
        expected = max(load) / (sum(load) / H100.sms)
        assert abs(plan.imbalance(group, call, config) - expected) < 1e-9


def test_persistent_programs_are_balanced():
    for length in (512, 1000, 1024, 1536, 2048, 3000, 4096, 8192, 16384):
        for dim in (64, 128, 256):
            call = call_of((dim, dim), (length, length), batch=max(1, 32768 // length), heads=2048 // dim, causal=True)
            config, group = plan.balance(plan.pick(call, (dim, dim)), call)
            assert group >= 1
            assert not config.persistent or plan.imbalance(group, call, config) <= 1.1


def test_edges_that_cut_nothing_are_none():
    assert call_of((64, 64), (100, 300), causal=True, window=(299, None)).o.window_left == -1
    assert call_of((64, 64), (100, 300), causal=True, window=(298, None)).o.window_left == 298
    assert call_of((64, 64), (100, 300), window=(None, 99)).o.window_right == -1
    assert call_of((64, 64), (100, 300), window=(5, 98)).o.window_right == 98


def test_a_long_window_goes_where_heads_balance_it():
    call = call_of((128, 128), (2048, 2048), batch=2, heads=8, causal=True, window=(1500, None))
    config, group = plan.balance(plan.pick(call, (128, 128)), call)
    assert config.persistent and plan.imbalance(group, call, config) < 1.1 < plan.imbalance(8, call, config)


def test_tiles_are_counted_where_they_are_many():
    """A counter must be zeroed first: it pays where a program has several tiles, and they much work."""
    config = plan.FAST[128, "causal"][1024]
    for causal in (False, True):
        assert plan.counted(config, call_of((128, 128), (1024, 1024), batch=32, heads=16, causal=causal))
        assert not plan.counted(config, call_of((128, 128), (1024, 1024), batch=4, heads=16, causal=causal))
        assert not plan.counted(config, call_of((128, 128), (32768, 32768), batch=1, heads=2, causal=causal))
    many = call_of((64, 64), (4096, 4096), batch=8, heads=32)
    assert not plan.counted(config, many) and not plan.counted(config._replace(persistent=False), many)


def test_heads_go_together_where_tiles_are_counted():
    """As many at any length, shared keys or not; a window, and tiles that are not counted, keep to the model."""
    config = plan.FAST[128, "square"][512]
    for length in (1024, 4096, 16384):
        call = call_of((128, 128), (length, length), batch=32768 // length, heads=16, causal=True)
        assert plan.balance(config, call, True) == (config, 8)
        assert plan.balance(config, call) != (config, 8)
    assert plan.balance(config, call_of((128, 128), (65536, 65536), batch=1, heads=6, causal=True), True) == (config, 6)
    full = call_of((128, 128), (4096, 4096), batch=8, heads=16)
    window = call_of((128, 128), (4096, 4096), batch=8, heads=16, causal=True, window=(1023, 0))
    for call in (full, window):
        assert plan.balance(config, call, True) == plan.balance(config, call)


def test_descriptors():
    """A size-1 dimension may have any stride; the box is one tile of one (batch, head)."""
    x = torch.empty(512 * 40, dtype=torch.bfloat16).as_strided((1, 1, 512, 40), (1, 3, 40, 1))
    made = hopper.descriptor(x, (64, 64))
    assert made.block_shape == [1, 1, 64, 64]
    assert made.shape == [1, 1, 512, 40]
    assert all(stride % 8 == 0 for stride in made.strides[:3])
    assert made.strides[2:] == [40, 1]
    expanded = torch.empty(1, 4, 128, 128).expand(3, 4, 128, 128)
    assert hopper.descriptor(expanded, (64, 128)).shape == [1, 4, 128, 128]


# -- the order of the sums of dQ ---------------------------------------------------------------------------------------


def run_interpreted(program: str) -> None:
    """Run a program in another process, with Triton's interpreter."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def as_python(function, **known):
    """A function of device code, for integers: what it calls is Python's, or `known`."""
    numbers = SimpleNamespace(minimum=builtins.min, maximum=builtins.max, where=lambda c, a, b: a if c else b)
    return FunctionType(function.fn.__code__, {**function.fn.__globals__, "gl": numbers, "BLOCK_N": 128, **known})


BLOCKS_OF = as_python(feed.blocks_of, blocks_of_queries=as_python(hopper.blocks_of_queries))
SHAPES = [
    (len_q, len_k, left, right, lens, block_m)
    for len_q, len_k in ((1, 1), (700, 700), (130, 1000), (1000, 130), (2049, 1500))
    for left, right in ((-1, -1), (-1, 0), (200, 0), (200, 30), (3, 2), (-1, 77), (150, -1))
    for lens in (None, 0, 100)
    for block_m in (64, 128)
]


def blocks_of(j: int, len_q: int, len_k: int, left: int, right: int, lens: int | None, block_m: int) -> tuple[int, int]:
    """The first block of queries that block of keys j visits, and their number."""
    of = SimpleNamespace(LEFT=left >= 0, RIGHT=right >= 0, LENS=lens is not None, BLOCK_M=block_m)
    begin, _, _, count = BLOCKS_OF(j * 128, len_q, len_k if lens is None else lens, left, right, of)
    return begin, count


@pytest.mark.parametrize("shape", SHAPES)
def test_the_keys_that_visit_a_block_of_queries_are_neighbours(shape):
    """So that whoever comes next waits for the keys before, or for nobody. And all that see something are visited."""
    len_q, len_k, left, right, lens, block_m = shape
    visits = defaultdict(list)
    for j in range(math.ceil(len_k / 128)):
        begin, count = blocks_of(j, *shape)
        assert count >= 1
        for m in range(begin, begin + count):
            visits[m].append(j)
    for who in visits.values():
        assert who == list(range(who[0], who[-1] + 1))
    n = len_k if lens is None else lens
    for i, j in itertools.product(range(0, len_q, 13), range(0, n, 13)):
        at = i + n - len_q
        if (left < 0 or j >= at - left) and (right < 0 or j <= at + right):
            assert j // 128 in visits[i // block_m]


@pytest.mark.parametrize("shape", [s for s in SHAPES if s[4] is None])
def test_a_sum_that_nobody_clears_has_a_first_piece(shape):
    """Where the first piece of a sum of dQ is stored, not added, every block of queries is visited, or the kernel
    behind looks whether it was; elsewhere the sum is cleared ahead."""
    len_q, len_k, left, right, _, block_m = shape
    dim = 64 if block_m == 128 else 128
    q, k = (torch.empty(2, 40, n, dim, dtype=torch.bfloat16, device="meta") for n in (len_q, len_k))
    with pretend(H100):
        window = (left if left >= 0 else None, right if right >= 0 else None)
        x, o, _ = inputs_of(q=q, k=k, v=k, window=window)
        plan = backward._launches(x, o, q, q, (q, k, k), False, False, False)
    first = plan.main.meta["FIRST"]
    assert first == (plan.turns > 0) == (plan.before.meta["TURNS"] == 2) == (not plan.before.meta["SUM"])
    assert not (first and plan.main.meta["THIRD"])  # in order it may
    visited = set()
    for j in range(math.ceil(len_k / 128)):
        begin, count = blocks_of(j, *shape)
        visited |= set(range(begin, begin + count))
    look = plan.behind.meta["LOOK"]
    assert look <= plan.main.meta["CLAIM"]
    assert not first or look or visited >= set(range(math.ceil(len_q / block_m)))
    assert first or block_m == 64  # there programs take tiles in turn


@pytest.mark.parametrize("shape", SHAPES[::3])
@pytest.mark.parametrize("sharing", [0, 1, 3])
@pytest.mark.parametrize("way", ["down", "up", "abreast"])
def test_what_a_tile_visits(shape, sharing, way):
    """All blocks of queries that see its keys, of all heads that share them, each once, from the last to the first, or
    upwards, or of all heads the last block, then the one before. sharing 0: known to be one head."""
    alone, sharing = not sharing, sharing or 1
    before_visits = as_python(feed.before_visits, before_first=as_python(feed.before_first))
    visit = as_python(feed.visit, step=as_python(feed.step))
    _, _, left, right, lens, block_m = shape
    plan = SimpleNamespace(
        LEFT=left >= 0, RIGHT=right >= 0, LENS=lens is not None, VARLEN=False, CUT=False, UP=way == "up",
        ABREAST=way == "abreast", SHIFTED=False, CROSSED=False,
        ALONE=alone,
    )  # fmt: skip
    stride, first, hk = math.ceil(shape[0] / block_m), 1000, 5
    for j in range(math.ceil(shape[1] / 128)):
        begin, count = blocks_of(j, *shape)
        blocks = range(begin, begin + count) if plan.UP else reversed(range(begin, begin + count))
        wanted = list(itertools.product(reversed(range(sharing)), blocks))
        if plan.ABREAST:
            wanted.sort(key=lambda at: at[::-1], reverse=True)
        at = before_visits(hk, first, begin, count, sharing, stride, plan)
        for h, m in wanted:
            at = visit(*at, hk, begin, count, sharing, stride, plan)
            assert at == (m, hk * sharing + h, first + h * stride + m)


# heads, heads of keys, head_dim, in order, options, query heads of a program, if they are packed
SHARED = [
    (32, 1, 128, False, {"causal": True}, 4, 4),
    (32, 4, 128, False, {"causal": True}, 4, 4),
    (32, 4, 128, True, {"causal": True}, 4, 4),
    (32, 1, 64, False, {"causal": True}, 2, 4),
    (32, 1, 64, True, {"causal": True}, 2, 1),
    (12, 2, 128, False, {"causal": True}, 3, 3),
    (10, 2, 128, False, {"causal": True}, 1, 1),
    (8, 2, 128, False, {"causal": True}, 4, 4),
    (8, 8, 64, False, {"causal": True}, 1, 1),
    (32, 1, 128, False, {}, 32, 1),
    (32, 2, 128, False, {}, 16, 1),
    (32, 4, 128, False, {}, 8, 8),
    (32, 1, 128, True, {"window": (500, 0), "causal": True}, 32, 1),
]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "ordered", "options", "each", "packed"), SHARED)
@pytest.mark.parametrize("varlen", [False, True])
def test_the_heads_that_share_keys_are_split(heads, kv_heads, dim, ordered, options, each, packed, varlen):
    """Each part has its own tiles, and keys that all of its query heads share."""
    size = (16384,) if varlen else (4, 4096)
    q, k, v = (torch.empty(*size, n, dim, dtype=torch.bfloat16, device="meta") for n in (heads, kv_heads, kv_heads))
    if varlen:
        ends = torch.empty(3, dtype=torch.int32, device="meta")
        options, each = options | {"cu_seqlens_q": ends, "cu_seqlens_k": ends}, packed
    else:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    with pretend(H100):
        x, o, _ = inputs_of(q=q, k=k, v=v, **options)
        plan = backward._launches(x, o, q, q, (q, k, v), False, False, ordered)
    given = dict(zip(plan.main.kernel.arg_names[18:], plan.main.scalars))
    sharing = heads // kv_heads
    assert plan.splits * each == sharing
    assert given["heads"] // given["kv_heads"] == each
    assert given["splits"] == plan.splits
    n_tiles = given["whole"] + (given["n_tiles"] - given["whole"]) // given["pieces"]
    assert n_tiles == kv_heads * plan.splits * (130 if varlen else 128)
    for part in range(given["kv_heads"]):
        for h in range(part * each, part * each + each):
            assert h // sharing == part // given["splits"]
    assert not plan.main.meta["WIDE"]
    if plan.splits > 1:
        part = backward._place(k, plan.splits)
        assert part.is_contiguous() and part.shape[1] == given["kv_heads"]


@pytest.mark.parametrize("causal", [False, True])
def test_one_head_of_keys_fills_the_gpu_as_its_queries_are_split(causal):
    """Unless keys are so many that parts of dK would take more memory than twice the queries."""
    for length, keys, fits in ((4096, 4096, True), (512, 1024, True), (512, 2048, False)):
        q, k = (torch.empty(2, n, s, 128, dtype=torch.bfloat16, device="meta") for n, s in ((32, length), (1, keys)))
        with pretend(H100):
            x, o, _ = inputs_of(q=q, k=k, v=k, causal=causal)
            assert (limits.hopper_bwd(problem(x, o)) is None) == fits


@pytest.mark.parametrize(("batch", "length", "heads"), [(8, 1024, 8), (16, 512, 16), (4, 4096, 4), (7, 4096, 4)])
def test_heads_that_wait_for_each_other_abreast_go_in_equal_groups(batch, length, heads):
    """Those of few heads that are left over would all wait for the first keys."""
    q, k = (torch.empty(batch, n, length, 128, dtype=torch.bfloat16, device="meta") for n in (32, 8))
    with pretend(H100):
        x, o, _ = inputs_of(q=q, k=k, v=k, causal=True)
        main = backward._launches(x, o, q, q, (q, k, k), False, False, True).main
    assert main.meta["ABREAST"] and not main.meta["UP"]
    assert main.scalars[main.kernel.arg_names[18:].index("group")] == heads


@pytest.mark.parametrize(("length", "way", "group"), [(2048, "up", 8), (16384, "up", 4), (131072, "up", 4),
                                                      (131072, "in order", 1), (131072, "full", 1)])  # fmt: skip
def test_four_heads_at_least_are_in_flight_where_tiles_walk_upwards(length, way, group):
    """Of one, the tiles that begin as others end would come to the same queries together."""
    q = torch.empty(2, 16, length, 128, dtype=torch.bfloat16, device="meta")
    with pretend(H100):
        x, o, _ = inputs_of(q=q, k=q, v=q, causal=way != "full")
        plan = backward._launches(x, o, q, q, (q, q, q), False, False, way == "in order")
    assert dict(zip(plan.main.kernel.arg_names[18:], plan.main.scalars))["group"] == group


def test_parts_are_no_more_than_queries():
    q, k = (torch.empty(1, heads, n, 128, dtype=torch.bfloat16, device="meta") for heads, n in ((32, 2048), (1, 8192)))
    with pretend(H100):
        x, o, _ = inputs_of(q=q, k=k, v=k, causal=True)
        assert backward._launches(x, o, q, q, (q, k, k), False, False, False).splits == 1


def test_parts_of_float16_are_written_in_float32():
    """At the head_dim that there is, not at that in memory; what TMA would write is the gradient."""
    q, k = (torch.empty(2, n, 2048, 72, dtype=torch.float16, device="meta") for n in (32, 4))
    with pretend(H100):
        x, o, _ = inputs_of(q=q, k=k, v=k, causal=True)
        plan = backward._launches(x, o, q, q, (q, k, k), False, False, False)
        whole = backward._launches(*inputs_of(q=q, k=k, v=k)[:2], q, q, (q, k, k), False, False, False)
    assert plan.splits == 2 and plan.main.meta["WIDE"] and plan.main.meta["HEAD_DIM"] == 72
    assert whole.splits == 1 and not whole.main.meta["WIDE"] and whole.main.meta["HEAD_DIM"] == 128
    assert backward._place(k, 2).dtype == torch.float32 and backward._place(k, 1) is k


@pytest.mark.parametrize("inside", [0, 3])
@pytest.mark.parametrize("programs", [1, 7, 11])
def test_each_tile_is_taken_once_and_heads_stay_whole(programs, inside):
    heads, n_blocks = 11, 3
    plan = SimpleNamespace(INSIDE=inside, ONCE=not inside)
    seen = []
    for program in range(programs if inside else heads * n_blocks):
        device = SimpleNamespace(
            program_id=lambda _, at=program: at,
            num_programs=lambda _, inside=inside: programs if inside else heads * n_blocks,
            where=lambda c, a, b: a if c else b,
        )
        t = as_python(feed.first_tile, gl=device)(n_blocks, plan)
        mine = []
        while t < heads * n_blocks:
            mine.append(t)
            t = as_python(feed.tile_behind, gl=device)(t, heads * n_blocks, n_blocks, plan)
        if inside:
            assert [t % n_blocks for t in mine] == list(range(n_blocks)) * (len(mine) // n_blocks)
        seen += mine
    assert sorted(seen) == list(range(heads * n_blocks))


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("bias_shape", [(1, 6), (1, 1), (2, 6), (2, 1), (4, 6), (4, 1)])
def test_the_sum_of_a_bias_takes_each_sharer_once(bias_shape, parts):
    """Each tile of each slice gets every (batch, head) that shares it, from one part or another."""
    batch, heads, len_q, len_k = 4, 6, 300, 200
    repeats, slices = batch // bias_shape[0], bias_shape[0] * bias_shape[1]
    plan = SimpleNamespace(SHARED_HEADS=bias_shape[1] < heads, LEFT=False, RIGHT=False, LENS=False)
    counts = (heads, 2, repeats, bias_shape[1], slices, parts, 320, len_q, len_k, -1, -1, 3 * 2 * slices * parts)
    tile, sharer = as_python(bias_pass._tile, BLOCK=128), as_python(bias_pass._sharer)
    found = defaultdict(list)
    for t in range(counts[-1]):
        piece, part, m0, n0, first, end = tile(t, counts, plan)
        assert 0 <= part < parts
        found[piece, m0, n0] += [sharer(r, piece, counts, plan) for r in range(first, end)]
    assert len(found) == 3 * 2 * slices
    for (piece, _, _), who in found.items():
        b, h = divmod(piece, bias_shape[1])
        some_heads = range(heads) if plan.SHARED_HEADS else (h,)
        assert sorted(who) == sorted(itertools.product(range(b * repeats, (b + 1) * repeats), some_heads))


@pytest.mark.parametrize("window", [(-1, 0), (100, 20)])
def test_the_sum_of_a_bias_skips_only_what_nobody_sees(window):
    len_q, len_k, (left, right) = 700, 900, window
    plan = SimpleNamespace(SHARED_HEADS=False, LEFT=left >= 0, RIGHT=right >= 0, LENS=False)
    counts = (1, 1, 2, 1, 1, 1, 704, len_q, len_k, left, right, 6 * 8)
    tile = as_python(bias_pass._tile, BLOCK=128, keys_seen=as_python(hopper.keys_seen))
    skipped = 0
    for t in range(6 * 8):
        _, _, m0, n0, first, end = tile(t, counts, plan)
        i = torch.arange(m0, min(m0 + 128, len_q))[:, None] + len_k - len_q
        j = torch.arange(n0, min(n0 + 128, len_k))
        seen = (j <= i + right) & ((j >= i - left) if left >= 0 else True)
        assert (end > first) >= bool(seen.any())
        skipped += end == first
    assert skipped > 8


def finishes(shape, heads: int, programs: int, take: str = "in order", ordered: bool = True, up: bool = False,
             descending: bool = False, abreast: int = 1) -> bool:  # fmt: skip
    """Whether programs that take tiles by number and wait as `feed.adder` does come to an end, whatever order they run
    in; each adds in the order of the keys (from the last to the first if `descending`), or, not ordered, behind the
    first that visit the block; up: that came to it. abreast: heads that share keys, visited block by block."""
    n_n = math.ceil(shape[1] / 128)
    tiles = [(head, n_n - 1 - j if descending else j) for j in range(n_n) for head in range(heads)]
    if take == "backwards":
        tiles.reverse()
    turns, running = defaultdict(int), []

    def downwards(head: int, j: int):
        begin, count = blocks_of(j, *shape)
        behind, _ = blocks_of(j + 1, *shape)
        for m in range(begin, begin + count):
            first, place = j == n_n - 1 or m < behind, n_n - 1 - j
            while turns[head, m] < (0 if first else place):
                yield False
            assert turns[head, m] == (0 if first else place)
            turns[head, m] = place + 1
            yield True

    def steps(head: int, j: int):
        begin, count = blocks_of(j, *shape)
        before_begin, before_count = blocks_of(j - 1, *shape)
        for m in range(begin, begin + count) if up else ():
            first = turns[head, m] == 0
            turns[head, m] = turns[head, m] or -1
            yield True
            while turns[head, m] < 0 and not first:
                yield False
            turns[head, m] = 1
            yield True
        for m, h in (
            itertools.product(reversed(range(begin, begin + count)), reversed(range(abreast))) if not up else ()
        ):
            first, at = j == 0 or m >= before_begin + before_count, (head, m, h)
            while turns[at] < (0 if first else j if ordered else 1):
                yield False
            assert turns[at] <= j and (turns[at] == 0) == first
            if ordered or first:
                turns[at] = j + 1
            yield True

    while tiles or running:
        while tiles and len(running) < programs:
            running.append((downwards if descending else steps)(*tiles.pop(0)))
        moved, left = False, []
        for walker in random.sample(running, len(running)):
            done = next(walker, None)
            moved |= done is not False
            left += [] if done is None else [walker]
        if not moved:
            return False
        running = left
    return True


@pytest.mark.parametrize("how", [{}, {"ordered": False}, {"up": True}, {"abreast": 3}])
@pytest.mark.parametrize("programs", [1, 2, 5, 132])
@pytest.mark.parametrize("shape", SHAPES[::5])
def test_programs_that_wait_for_each_other_end(shape, programs, how):
    random.seed(0)
    assert finishes(shape, 3, programs, **how)


EDGE = [s for s in SHAPES if s[3] >= 0 and s[4] is None and s[0] <= s[1]]  # to the right: causal masks, windows


@pytest.mark.parametrize("programs", [1, 2, 5, 132])
@pytest.mark.parametrize("shape", [*EDGE, (1500, 2049, -1, 0, None, 64)])
def test_programs_that_wait_for_the_keys_behind_end(shape, programs):
    random.seed(0)
    assert finishes(shape, 3, programs, descending=True)
    assert programs > 1 or shape[1] < 256 or not finishes(shape, 3, programs, take="backwards", descending=True)


@pytest.mark.parametrize("how", [{}, {"ordered": False}, {"up": True}, {"abreast": 3}])
def test_programs_that_wait_for_those_that_have_not_begun_do_not_end(how):
    """Who waits only for those that came before it to a block waits for none of them."""
    assert finishes((700, 700, -1, -1, None, 64), 3, 5, take="backwards", **how) == ("up" in how)


def test_whoever_hands_out_tiles_hands_out_the_first_too():
    """A program that has not begun has no tile that others might wait for."""
    source = inspect.getsource(feed.producer.fn)
    taken = [line for line in source.splitlines() if "atomic_add(Taken" in line]
    assert len(taken) == 2 and "num_programs" not in source
    assert source.index(taken[0].strip()) < source.index("while t < n_tiles")


def test_ordered_sums_repeat_under_load(cuda):
    """dQ has the same bits however programs come to run, and differs without the order."""
    from adatom.ops.attention import hopper_bwd, hopper_fwd

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    lens = torch.tensor([1900, 1000, 77, 640], dtype=torch.int32, device=cuda)
    for dim, kv_heads, len_k, options in (
        (64, 8, 1900, {}), (64, 2, 1900, {"causal": True}), (64, 8, 1900, {"causal": True, "kv_lens": lens}),
        (128, 8, 1900, {}), (128, 2, 1900, {}), (128, 8, 1900, {"causal": True}), (128, 8, 1300, {"causal": True}),
        (128, 8, 1900, {"window": (300, 0)}), (128, 8, 1900, {"window": (100, 50)}), (128, 2, 1900, {"causal": True}),
        (128, 2, 1900, {"causal": True, "kv_lens": lens}),
    ):  # fmt: skip
        q, dout = (torch.randn(4, 8, 1900, dim, device=cuda, dtype=torch.bfloat16) for _ in range(2))
        k, v = (torch.randn(4, kv_heads, len_k, dim, device=cuda, dtype=torch.bfloat16) for _ in range(2))
        x, o, _ = inputs_of(q, k, v, **options)
        out, lse = hopper_fwd.forward(x, o)
        first = hopper_bwd.backward_ordered(x, o, out, lse, dout, None, False)
        unordered = hopper_bwd.backward(x, o, out, lse, dout, None, False)[0]
        assert not torch.equal(first[0], unordered)
        load, side = torch.empty(2**27, device=cuda), torch.cuda.Stream()
        for _ in range(200):
            with torch.cuda.stream(side):
                load.mul_(1.5)
            again = hopper_bwd.backward_ordered(x, o, out, lse, dout, None, False)
            assert all(torch.equal(a, b) for a, b in zip(first[:3], again[:3]))


# -- the gradient of a shared bias -------------------------------------------------------------------------------------


# -- packed sequences --------------------------------------------------------------------------------------------------

TABLE = """
import random, torch
from adatom.ops.attention.hopper_packed import HEADER, _table_kernel

random.seed(0)
CALLS = (1, False, True, 300), (9, True, False, 900), (40, False, False, 1), (5, True, False, 10**6)
for n, keys, last_first, together in CALLS:
    lens_q, lens_k = ([random.choice((0, 1, 5, 64, 128, 130, 700)) for _ in range(n)] for _ in range(2))
    cu_q, cu_k = (torch.tensor([0, *lens]).cumsum(0).int() for lens in (lens_q, lens_k))
    tiled, work = (lens_k, lens_q) if keys else (lens_q, lens_k)
    slots, heads, parts = sum(tiled) // 128 + n, 5, 1 + n % 3
    table = torch.full((slots * heads + 1, HEADER.value), -7, dtype=torch.int32)
    _table_kernel[(n * parts,)](
        table, cu_q, cu_k, n, parts, heads, together, 2, KEYS=keys, LAST_FIRST=last_first,
        EARLY=False, BLOCK=128, BLOCK_Q=64, LINES=8, SEQUENCES=16,
    )
    lines = []
    for b in sorted(range(n), key=lambda b: (-work[b], b)):
        tiles = -(-tiled[b] // 128)
        group = max(1, min(heads, max(together // max(lens_q[b], 1), 2)))
        for first in range(0, heads, group):
            for block in reversed(range(tiles)) if last_first else range(tiles):
                for h in range(first, min(first + group, heads)):
                    start = int(cu_q[b])
                    lines.append([block * 128, start, int(cu_k[b]), lens_q[b], lens_k[b], start // 64 + b, h])
    assert table[0, :2].tolist() == [len(lines), 0] and (table[1 + len(lines) :] == -7).all()
    assert table[1 : 1 + len(lines), :7].tolist() == lines
"""


def test_the_table_of_packed_tiles():
    """It lists every tile once, in the order that is wanted, in Triton's interpreter."""
    run_interpreted(TABLE)
