"""How large products are divided among programs, and dz among the makers: what can be worked out on the host."""

from __future__ import annotations

import builtins
import itertools
from collections import Counter, defaultdict
from types import FunctionType, SimpleNamespace

import pytest
import torch

from adatom.device import Device, pretend

pytest.importorskip("triton.experimental.gluon")

from adatom.ops.linear import hopper_cuts as cuts  # noqa: E402
from adatom.ops.linear import hopper_linear, hopper_made  # noqa: E402

H100 = Device("cuda", 90, 132, 232448)
SHAPES = [  # tiles below and beside each other, tiles of k
    ((64, 32), 128),
    ((64, 64), 64),
    ((128, 32), 32),
    ((64, 16), 256),
    ((128, 8), 128),
    ((64, 8), 256),
    ((65, 33), 100),
    ((99, 50), 77),
    ((33, 5), 64),
    ((34, 16), 64),
    ((47, 17), 64),
]


def divided(tiles, k_tiles, programs=132):
    found = cuts.divide(tiles, (128, 256), k_tiles, programs, 16, 8)
    assert found is not None
    return found


@pytest.mark.parametrize("tiles, k_tiles", SHAPES)
def test_every_part_of_every_tile_is_multiplied_once(tiles, k_tiles):
    """And by an owner, who adds what others wrote, in the order of k."""
    lines, slots = divided(tiles, k_tiles)
    parts, writers = defaultdict(list), {}
    for p, mine in enumerate(lines):
        for line in mine:
            assert line.count == 1 or (line.begin, line.end) == (0, k_tiles)
            assert line.end > line.begin
            for i in range(line.count):
                parts[line.row + i * line.step, line.column].append((line.begin, line.end, p, line))
            if line.others < 0:
                assert line.slot not in writers
                writers[line.slot] = line
    assert set(parts) == {(128 * r, 256 * c) for r in range(tiles[0]) for c in range(tiles[1])}
    for (row, column), found in parts.items():
        found.sort(key=lambda part: part[:2])
        assert found[0][0] == 0 and found[-1][1] == k_tiles
        assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
        owner = found[-1][3]
        assert owner.others == len(found) - 1
        for i, (*_, line) in enumerate(found[:-1]):
            assert line.others == -1 and line.slot == owner.slot + i
            assert (line.row, line.column) == (row, column)
    assert sorted(writers) == list(range(slots))


@pytest.mark.parametrize("tiles, k_tiles", SHAPES)
def test_programs_end_together(tiles, k_tiles):
    lines, _ = divided(tiles, k_tiles)
    work = [sum(line.count * (line.end - line.begin) for line in mine) for mine in lines]
    ideal = tiles[0] * tiles[1] * k_tiles / 132
    assert max(work) <= ideal + k_tiles / cuts.MOST + cuts.SHORT
    assert max(work) + cuts.MEND <= -(-tiles[0] * tiles[1] // 132) * k_tiles
    assert max(len(mine) for mine in lines) <= 12


@pytest.mark.parametrize("tiles, k_tiles", SHAPES)
def test_nobody_waits_for_a_program_behind(tiles, k_tiles):
    """Programs begin in the order of their numbers; what others wait for is written before one waits oneself."""
    lines, _ = divided(tiles, k_tiles)
    writer = {line.slot: p for p, mine in enumerate(lines) for line in mine if line.others < 0}
    for p, mine in enumerate(lines):
        waits = [line.others > 0 for line in mine]
        writes = [line.others < 0 for line in mine]
        assert True not in waits or True not in writes[waits.index(True) :]
        for line in mine:
            assert all(writer[slot] < p for slot in range(line.slot, line.slot + max(line.others, 0)))


def test_whole_tiles_where_cutting_gains_nothing():
    for tiles, k_tiles in (((32, 16), 16), ((33, 4), 64), ((1, 1), 64), ((66, 2), 64), ((8, 16), 64)):
        assert cuts.divide(tiles, (128, 256), k_tiles, 132, 16, 8) is None


def test_the_table():
    x = torch.empty(1)
    table, slots = cuts.table_of(x, (64, 32), (128, 256), 128, 132, 16, 8)
    lines, expected = divided((64, 32), 128)
    assert slots == expected
    n = sum(map(len, lines))
    assert table.shape == (8 * n + 133,)
    for p, mine in enumerate(lines):
        first, end = table[8 * n + p], table[8 * n + p + 1]
        assert [cuts.Line(*line) for line in table[8 * first : 8 * end].view(-1, 8).tolist()] == mine


def as_python(function, **known):
    """A function of device code, for integers."""
    numbers = SimpleNamespace(minimum=builtins.min, maximum=builtins.max, where=lambda c, a, b: a if c else b)
    return FunctionType(function.fn.__code__, {**function.fn.__globals__, "gl": numbers, **known})


@pytest.mark.parametrize("rows, columns, run", [(8192, 8192, 8), (8192, 16384, 8), (1000, 3000, 4), (130, 8, 1)])
def test_makers_take_each_task_once(rows, columns, run):
    task = as_python(hopper_made._task, TASKS=8)
    tiles, chunks, run, group, n_tasks = hopper_made.numbers(rows, columns, run, 16)
    found = Counter(task(i, tiles, chunks, run, group) for i in range(n_tasks))
    assert set(found.values()) == {1}
    wanted = set(itertools.product(range(tiles), range(chunks), range(8)))
    assert wanted <= set(found)
    assert all(tile >= tiles for tile, *_ in set(found) - wanted)
    first = [task(i, tiles, chunks, run, group) for i in range(group * 8)]
    assert {tile % run for tile, *_ in first} == {0} and {chunk for _, chunk, _ in first} == {chunks // 2}


def test_which_products_are_cut():
    with pretend(H100):
        for m, k, n, cut in ((8192, 8192, 8192, True), (4096, 1024, 4096, False), (128, 8192, 8192, False)):
            a, b = torch.empty(1).expand(m, k), torch.empty(1).expand(n, k)
            assert (hopper_linear._cuts(a, b, False, "") is not None) == cut
