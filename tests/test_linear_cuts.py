"""How large products are divided among programs: what can be worked out on the host, for an invented H100."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
import torch

from adatom.device import Device, pretend

pytest.importorskip("triton.experimental.gluon")

from adatom.ops.linear import hopper_cuts as cuts  # noqa: E402
from adatom.ops.linear import hopper_linear  # noqa: E402

H100 = Device("cuda", 90, 132, 232448)
SHAPES = [  # tiles below and beside each other, tiles of k, tiles of a run
    ((64, 32), 128, 8),
    ((64, 64), 64, 8),
    ((128, 32), 64, 8),
    ((64, 16), 256, 8),
    ((128, 8), 128, 8),
    ((64, 8), 256, 4),
    ((512, 3), 64, 4),
    ((8, 56), 64, 2),
]


def divided(tiles, k_tiles, run):
    found = cuts.divide(tiles, (128, 256), k_tiles, 132, 16, run, k_tiles - 16)
    assert found is not None
    return found


@pytest.mark.parametrize("tiles, k_tiles, run", SHAPES)
def test_every_part_of_every_tile_is_multiplied_once(tiles, k_tiles, run):
    """And an owner adds what the one who has the rest wrote."""
    lines, slots = divided(tiles, k_tiles, run)
    parts = defaultdict(list)
    for mine in lines:
        for line in mine:
            assert 0 <= line.cut < line.length <= k_tiles
            for i in range(line.count):
                last = i == line.count - 1
                slot = line.slot + i if line.others < 0 else line.slot if last and line.others else None
                begin = line.cut if last else 0
                parts[line.row + i * line.step, line.column].append((begin, line.length, line.others < 0, slot))
    assert set(parts) == {(128 * r, 256 * c) for r in range(tiles[0]) for c in range(tiles[1])}
    written = []
    for found in parts.values():
        found.sort()
        assert found[0][0] == 0 and found[-1][1] == k_tiles
        assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
        if len(found) == 1:
            assert found[0][2:] == (False, None)
        else:
            (*_, gives, slot), (*_, owner, same) = found
            assert gives and not owner and slot == same
            written.append(slot)
    assert sorted(written) == list(range(slots))


@pytest.mark.parametrize("tiles, k_tiles, run", SHAPES)
def test_programs_end_together(tiles, k_tiles, run):
    lines, _ = divided(tiles, k_tiles, run)
    work = [sum(line.count * line.length - line.cut for line in mine) for mine in lines]
    rounds = -(-tiles[0] // run * tiles[1] // 132)
    assert max(work) + cuts.MEND <= rounds * run * k_tiles
    assert max(work) <= tiles[0] * tiles[1] * k_tiles / 132 + 0.4 * k_tiles


@pytest.mark.parametrize("tiles, k_tiles, run", SHAPES)
def test_nobody_waits_for_a_program_behind(tiles, k_tiles, run):
    """Programs begin in the order of their numbers; who helps waits for nobody."""
    lines, _ = divided(tiles, k_tiles, run)
    helpers = [p for p, mine in enumerate(lines) if any(line.others < 0 for line in mine)]
    owners = [p for p, mine in enumerate(lines) if any(line.others > 0 for line in mine)]
    assert max(helpers) < min(owners)


def test_whole_tiles_where_cutting_gains_nothing():
    for tiles, k_tiles, run in (((32, 16), 16, 4), ((33, 4), 64, 4), ((66, 2), 64, 1), ((66, 8), 64, 4)):
        assert cuts.divide(tiles, (128, 256), k_tiles, 132, 16, run, k_tiles - 12) is None


def test_the_table():
    table, slots = cuts.table_of(torch.empty(1), (64, 32), (128, 256), 128, 132, 16, 8, 112)
    lines, expected = divided((64, 32), 128, 8)
    assert slots == expected
    n = sum(map(len, lines))
    assert table.shape == (8 * n + 133,)
    for p, mine in enumerate(lines):
        first, end = table[8 * n + p], table[8 * n + p + 1]
        assert [cuts.Line(*line) for line in table[8 * first : 8 * end].view(-1, 8).tolist()] == mine


def test_which_products_are_cut():
    with pretend(H100):
        for m, k, n, cut in ((8192, 8192, 8192, True), (4096, 1024, 4096, False), (128, 8192, 8192, False)):
            a, b = torch.empty(1).expand(m, k), torch.empty(1).expand(n, k)
            assert (hopper_linear._cuts(a, b, False, "", 0) is not None) == cut
