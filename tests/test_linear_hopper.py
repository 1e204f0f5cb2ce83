"""The schedule of the Hopper products: what its launcher works out on the host, for an invented H100."""

from __future__ import annotations

import pytest
import torch

from adatom.device import Device, pretend
from adatom.ops.linear.api import inputs_of
from adatom.ops.linear.problem import problem
from adatom.registry import choose, rows

pytest.importorskip("triton.experimental.gluon")

from adatom.ops.linear import hopper_linear, hopper_made  # noqa: E402
from adatom.tiles.launch import observed  # noqa: E402

H100 = Device("cuda", 90, 132, 232448)


def posed(m=4096, k=1024, n=4096, dtype=torch.bfloat16, machine=H100, cut=0, **options):
    x = torch.empty(m, k + cut, dtype=dtype)[:, cut:]
    w = torch.empty(n, k, dtype=dtype)
    with pretend(machine):
        given, o, recompute, _ = inputs_of(x, w, **options)
        return problem(given, o, recompute)


def test_where_hopper_runs():
    assert choose("linear_fwd", posed()).backend == "hopper"
    assert choose("linear_bwd", posed(activation="gelu", recompute=True)).backend == "hopper"
    assert choose("linear_fwd", posed(machine=H100._replace(arch=80), activation="gelu")).backend == "triton"
    assert choose("linear_fwd", posed(machine=H100._replace(arch=80))).backend == "torch"
    assert choose("linear_fwd", posed(machine=H100._replace(arch=80), dtype=torch.float32)).backend == "triton"


def test_few_rows_and_tiles_are_left_to_pytorch():
    for op, options, backend in (
        ("linear_fwd", {"m": 16, "n": 14336}, "torch"),
        ("linear_fwd", {"m": 16, "n": 14336, "activation": "gelu"}, "hopper"),
        ("linear_fwd", {"m": 256, "activation": "gelu"}, "torch"),
        ("linear_fwd", {"m": 512, "activation": "gelu"}, "hopper"),
        ("linear_fwd", {"m": 1024, "k": 8192, "n": 1024, "activation": "gelu"}, "torch"),
        ("linear_fwd", {"m": 256, "activation": "gelu", "recompute": True}, "torch"),
        ("linear_bwd", {"m": 128, "activation": "gelu"}, "torch"),
        ("linear_bwd", {"m": 512, "activation": "gelu"}, "hopper"),
        ("linear_bwd", {"m": 128, "activation": "gelu", "recompute": True}, "hopper"),
        ("linear_fwd", {"n": 4100, "activation": "gelu"}, "torch"),
        ("linear_fwd", {"n": 4095, "activation": "gelu"}, "triton"),
        ("linear_fwd", {"m": 64, "n": 4095, "activation": "gelu"}, "torch"),
    ):
        assert choose(op, posed(**options)).backend == backend, (op, options)
    assert choose("linear_fwd", posed(m=16), "hopper").backend == "hopper_any"


@pytest.mark.parametrize(
    "options, why",
    [
        ({"dtype": torch.float32}, "takes float16 and bfloat16"),
        ({"n": 4100}, "multiples of 8 features; got 1024 and 4100"),
        ({"k": 1028}, "multiples of 8 features; got 1028 and 4096"),
        ({"cut": 4}, "multiples of 16 bytes"),
        ({"m": 0}, "empty"),
        ({"machine": H100._replace(arch=100)}, "this is sm_100"),
    ],
)
def test_what_hopper_does_not_take(options, why):
    (row,) = (row for row in rows("linear_fwd") if row.backend == "hopper")
    assert why in row.refuses(posed(**options))


def stream(count, k_tiles, u, solo):
    """What the producer puts in the ring for a run: (k, first consumer's tile or None, second's) of each use."""
    uses = []
    for block in range(2, 4 * count + 3):
        turn, which = divmod(block, 4)
        begin, end = {0: (0, u), 2: (u + solo, k_tiles)}.get(which, (u, u + solo))
        first = (turn - 1 if which == 0 else turn) if which != 1 and (which == 0 or turn < count) else None
        second = turn - 1 if which != 3 and turn > 0 else None
        uses += [(k, first, second) for k in range(begin, end)]
    return uses


@pytest.mark.parametrize(
    "count, k_tiles, u, solo",
    [(5, 16, 8, 4), (8, 128, 120, 0), (4, 16, 5, 5), (1, 7, 7, 0), (3, 1, 0, 0), (8, 64, 32, 0), (2, 3, 1, 1)],
)
def test_consumers_find_their_sums_in_the_ring(count, k_tiles, u, solo):
    """Each consumer's k_tiles uses in a row hold each k of its tile once, and its steps lead from tile to tile."""
    uses, w = stream(count, k_tiles, u, solo), k_tiles - u - solo
    n = {0: 0, 1: w + solo}
    for tile in range(count):
        for consumer in (0, 1):
            mine = uses[n[consumer] : n[consumer] + k_tiles]
            assert sorted(k for k, *_ in mine) == list(range(k_tiles))
            assert {use[1 + consumer] for use in mine} == {tile}
            n[consumer] += k_tiles + solo
    assert n[0] + w == n[1] - solo == len(uses)
    for consumer in (0, 1):  # nothing that a consumer reads is left out
        assert sum(use[1 + consumer] is not None for use in uses) == count * k_tiles


def test_the_blocks_of_a_run():
    """W is short, no block is longer than there are tiles of k, and U is left for both to work on."""
    assert hopper_linear._blocks(128, 0) == (8, 0)
    assert hopper_linear._blocks(16, 4) == (4, 4)
    for k_tiles in range(1, 300):
        for solo in (0, 3, 5, 16):
            w, s = hopper_linear._blocks(k_tiles, solo)
            assert s == min(solo, k_tiles // 2) and 0 <= w <= 8 and k_tiles - w - s >= max(1, w)


def test_runs_share_what_they_read():
    """With few rows of tiles, short runs: all programs at different columns would read more than the memory gives."""
    assert hopper_linear._length(16, 56, 8, 132, 0.1) < 8
    assert hopper_linear._length(8, 56, 8, 132, 0.1) <= 2
    for tiles in ((64, 32), (64, 64), (128, 32), (64, 16)):
        assert hopper_linear._length(*tiles, 8, 132, 0.1) == 8


def test_runs_keep_all_programs_busy():
    for tiles in ((32, 16), (64, 32), (64, 64), (128, 32), (4, 16), (1, 1), (7, 3)):
        run = hopper_linear._length(*tiles, 8, H100.sms)
        longest = -(-(-(-tiles[0] // run) * tiles[1]) // H100.sms) * run
        best = -(-tiles[0] * tiles[1] // H100.sms)
        assert 1 <= run <= 8
        assert longest <= best * 1.25 + 1
    assert hopper_linear._length(32, 16, 8, 132) == 4
    assert hopper_linear._length(4, 16, 8, 132) == 1


def test_narrow_tiles_where_wide_ones_would_leave_programs_idle():
    assert hopper_linear._pick(8192, 8192, 132) == hopper_linear.WIDE
    assert hopper_linear._pick(512, 1024, 132) == hopper_linear.NARROW


@pytest.mark.parametrize(
    "rows, columns, run, group, first", [(8192, 8192, 8, 16, 120), (4000, 2120, 1, 48, 0), (900, 8, 3, 2, 0)]
)
def test_every_task_is_given_out_once(rows, columns, run, group, first):
    """All of dz is made, and first what the first consumers of the runs begin with."""
    z = torch.empty(rows, columns, device="meta")
    tiles, chunks, run, group, n_tasks, start = hopper_made.numbers(z, run, group, first)
    number = hopper_made.TASKS.value
    tasks = [hopper_made._task.fn(i, chunks, run, group, start, number) for i in range(n_tasks)]
    existing = [task for task in tasks if task[0] < tiles]
    assert len(existing) == len(set(existing)) == tiles * chunks * number
    chunk = first // hopper_made.CHUNK.value
    assert {task[:2] for task in tasks[: group * number]} == {(m * run, chunk) for m in range(group)}


def launched(m, k, n, activation, needs=(True, True, True), kept=True):
    """The constexprs of the products of a backward on an invented H100."""
    found = []
    x, w, b, z = (torch.empty(s, dtype=torch.bfloat16) for s in ((m, k), (n, k), (n,), (m, n)))
    o = hopper_linear.Options(activation, False, "tf32")
    with pretend(H100), observed(lambda kernel, args, meta, spill: found.append(meta)):
        hopper_linear.backward(hopper_linear.Inputs(x, w, None, b), o, z if kept else None, z, needs)
    return [meta for meta in found if "MAKE" in meta]


def test_where_dz_is_made():
    """Beside the product for dx, if its tiles are wide, it takes long enough, and something was kept."""
    assert [p["MAKE"] for p in launched(4096, 2048, 4096, "gelu")] == ["gelu", ""]
    assert [p["MAKE"] for p in launched(4096, 1024, 4096, "gelu")] == ["", ""]
    assert [p["MAKE"] for p in launched(16384, 2048, 512, "gelu")] == ["", ""]
    assert [p["MAKE"] for p in launched(512, 2048, 2048, "gelu")] == ["", ""]
    assert [p["MAKE"] for p in launched(4096, 2048, 4096, "none", kept=False)] == ["", ""]
    assert [p["MAKE"] for p in launched(4096, 2048, 4096, "gelu", (False, True, True))] == [""]
    assert [p["MAKE"] for p in launched(4096, 2048, 4096, "gelu", kept=False)] == ["", "", ""]


def test_long_products_wait_for_the_kernel_ahead():
    """So that programs next to each other get multiprocessors next to each other."""
    assert [p["launch_pdl"] for p in launched(4096, 2048, 4096, "gelu")] == [True, True]
    assert [p["launch_pdl"] for p in launched(8192, 4096, 4096, "gelu")] == [False, False]
    x, gate, up = (torch.empty(n, 4096, dtype=torch.bfloat16) for n in (8192, 2048, 2048))
    o = hopper_linear.Options("silu", True, "tf32")
    found = []
    with pretend(H100), observed(lambda kernel, args, meta, spill: found.append(meta)):
        for weight, other in ((gate, up), (torch.cat((gate, up)), None)):  # half of these would be short
            hopper_linear.forward(hopper_linear.Inputs(x, weight, other, None), o, False)
    assert [p["launch_pdl"] for p in found] == [False, False]
