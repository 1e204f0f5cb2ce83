"""The memory that the backward under a shared bias borrows from its results, and its kernels on a GPU: gradients that
repeat whatever else runs, and streams that end."""

from __future__ import annotations

import math
import random

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from gluon_python import Pointer, Whole, parts_of, python  # noqa: E402
from test_hopper_deep import Machine  # noqa: E402
from test_hopper_shared import H100, HALF, by_units  # noqa: E402

from adatom.device import pretend  # noqa: E402
from adatom.ops.attention import hopper_shared_bwd as bwd  # noqa: E402
from adatom.ops.attention import hopper_shared_fwd as fwd  # noqa: E402
from adatom.ops.attention import hopper_sharers as common  # noqa: E402
from adatom.ops.attention import limits, reference  # noqa: E402
from adatom.ops.attention.api import inputs_of  # noqa: E402
from adatom.ops.attention.problem import problem  # noqa: E402
from adatom.ops.attention.triton_call import Call  # noqa: E402


def laid(shape, order, dim):
    """(batch, heads, length, dim), which lie in memory in that order."""
    t = torch.empty(*(shape[i] for i in order), dim, dtype=HALF, device="meta")
    return t.permute(*map(order.index, range(3)), 3)


def test_what_dk_and_dv_lend_is_stored_last():
    """No tile ahead of the first that waits touches it, nor lines of tiles that it does not wait for; it does not
    overlap, and every call takes what was planned."""
    choose, tile_of = random.Random(0), python(Machine(0, 0), bwd, 1)["_tile"]
    kinds = "whole", "longer", "some wait", "no room", "one part, not staged", "lines in dk", "in dv", "nowhere"
    seen = dict.fromkeys(kinds, 0)
    while min(seen.values()) < 6:
        batch, heads = choose.choice((8, 9, 16, 24, 33, 64, 128)), choose.choice((1, 2, 4, 8, 16))
        len_q, len_k = (
            choose.choice((256, 300, 384, 390, 512, 900)),
            choose.choice((256, 300, 380, 384, 520, 768, 2040)),
        )
        dims = choose.choice(((8, 8), (24, 24), (32, 32), (32, 8), (16, 32)))
        orders = [choose.choice(((0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 0, 1))) for _ in range(2)]
        q = laid((batch, heads, len_q), (0, 1, 2), dims[0])
        k, v = (laid((batch, heads, len_k), order, dim) for order, dim in zip(orders, dims))
        shape = choose.choice([1, 1, *(n for n in (2, 3) if batch % n == 0)]), choose.choice((1, heads))
        bias = torch.empty(*shape, len_q, -(-len_k // 8) * 8, dtype=HALF, device="meta")[..., :len_k]
        with pretend(H100):
            x, o, _ = inputs_of(q=q, k=k, v=v, bias=bias)
            if limits.hopper_shared_bwd(problem(x, o, True)):
                continue
            dk, dv = torch.empty_like(x.k), torch.empty_like(x.v)
            out = torch.empty(batch, heads, len_q, dims[1], dtype=HALF, device="meta")
            planned, again = bwd.Lent(dk, dv), bwd.Lent(dk, dv)
            with torch.device("meta"):  # whatever new tensors are on by default
                plan = bwd._launches(x, o, out, out, False, planned)
        names = plan.keys.kernel.arg_names
        given = dict(zip(names[names.index("bias_b") :], plan.keys.scalars))
        sharers, lines = plan.keys.meta["SHARERS"], plan.lines
        n_n, padded = -(-len_k // 64), given["padded"]
        with pretend(H100):
            units = by_units(x, bwd.units_of(Call(x, o), x.bias))
        order, unit_of = sum(units, []), [u for u, unit in enumerate(units) for _ in unit]
        assert given["n_tiles"] == len(units) * n_n
        there, rest = again.take_lines(lines)
        lends = dk if there.untyped_storage()._cdata == dk.untyped_storage()._cdata else dv
        assert there.is_contiguous() and rest.is_contiguous() and lines.held == given["in_lent"]
        assert there.numel() == 8 * padded * lines.held or not lines.held
        assert rest.numel() == 8 * padded * (batch * heads - lines.held)
        first_line = there.storage_offset() if lines.held else math.inf
        assert not lines.held or first_line + there.numel() == lends.numel() and first_line % 8 == 0
        end = {id(t): first_line if lines.held and t is lends else t.numel() for t in (dk, dv)}
        begin = dict(end)
        taken = [again.take(n) for n in plan.lent]
        assert again.free == planned.free
        for part in taken:  # one below the other
            for t in (dk, dv):
                if part.untyped_storage()._cdata == t.untyped_storage()._cdata:
                    assert 2 * (part.storage_offset() + part.numel()) == begin[id(t)] and part.storage_offset() % 2 == 0
                    begin[id(t)] = 2 * part.storage_offset()
        assert given["n_tiles"] <= given["stretch"] * 128
        for t in random.Random(0).sample(range(given["n_tiles"]), min(given["n_tiles"], 400)):
            counts = [given[name] for name in names[names.index("heads") : names.index("n_tiles") + 1]]
            of_batch, head, n0, first, place = tile_of(t, counts, sharers)
            stretch = t // given["stretch"]
            read = min(stretch, stretch * given["steep"] - given["less"])
            rows = torch.arange(n0, min(n0 + 64, len_k))
            for r in range(first, min(first + sharers, given["shared"])):
                piece = of_batch * shape[1] + head
                b, h = common.sharer.fn(r, piece, (heads, given["repeats"], shape[1]), shape[1] < heads)
                assert order[place + r - first] == b * heads + h and unit_of[place] == t // n_n
                for d in (dk, dv):
                    at = b * d.stride(0) + h * d.stride(1) + rows * d.stride(2)
                    at = torch.cat((at, at + d.shape[3] - 1))
                    if t < given["lent"]:
                        assert not ((at >= begin[id(d)]) & (at < end[id(d)])).any()
                    if d is lends and lines.held:
                        there = set(((at[at >= first_line] - first_line) // (8 * padded)).tolist())
                        assert all(unit_of[i] * n_n // given["stretch"] < read for i in there)
        seen["some wait"] += 0 < given["lent"] < given["n_tiles"]
        seen["no room"] += any(part.untyped_storage().nbytes() == 4 * part.numel() for part in taken if part.numel())
        seen["longer" if plan.before else "whole"] += 1
        seen["nowhere" if not lines.held else "lines in dk" if lends is dk else "in dv"] += 1
        if plan.before is None:
            assert plan.lent == () and (plan.parts > 0) == (plan.sums.parts > 1)
            assert plan.parts == plan.sums.parts * given["blocks"] * 64 * 64 <= H100.sms * 64 * 384
            assert given["shares"] * plan.keys.meta["ADD"] == given["blocks"] * 64
            seen["one part, not staged"] += plan.sums.parts == 1 and not plan.sums.meta["STAGED"]


def test_parts_of_the_gradient_of_the_bias():
    """Added in order, by shares, wherever lengths end."""
    names = python(Machine(0, 0), bwd, 1)
    for parts, slices, len_q, len_k, consumers, shape in (
        (1, 1, 64, 256, 396, (8, 64)), (2, 3, 100, 250, 30, (32, 48)), (4, 1, 130, 261, 60, (32, 48)),
        (7, 2, 60, 384, 100, (16, 96)),
    ):  # fmt: skip
        n_m, width = -(-len_q // 128) * 2, 256 if len_k <= 256 else 384
        assert bwd._shares(slices * n_m, width, consumers) == shape
        columns, shares = shape
        x = torch.randn(parts, slices, len_q, len_k) * 100
        total = torch.zeros(x.shape[1:])
        for part in x:
            total += part
        given, got = parts_of(x, width), torch.full(x.shape[1:], math.nan, dtype=HALF)
        sums = (parts, n_m, width, given[0].numel() // 4096, shares)
        for share in range(shares):
            names["_add_share"](Pointer(given), Pointer(got), sums, Whole(share), len_q, len_k, columns, len_k % 2 == 0)
        assert torch.equal(got, total.to(HALF))


def test_a_bias_with_padded_rows(cuda):
    """dbias, which has none, is written past TMA; dK has no room for all of its slices."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    q, k, v, dout = torch.randn(4, 8, 16, 380, 32, device="cuda", dtype=HALF).unbind()
    x, o, _ = inputs_of(q=q, k=k, v=v, bias=torch.randn(1, 16, 380, 384, device="cuda", dtype=HALF)[..., :380])
    exact = x._replace(**{name: getattr(x, name).double() for name in ("q", "k", "v", "bias")})
    out, lse = reference.forward(exact, o)
    want = reference.backward(exact, o, out, lse, dout.double(), None, True)[:4]
    got = bwd.backward(x, o, out.to(HALF), lse.float(), dout, None, True)[:4]
    for a, b in zip(got, want):
        assert ((a.double() - b).norm() / b.norm()).item() < 0.01


def check_repeats(forward, backward, dtype, n_streams, shapes):
    """All gradients at (batch, heads, queries, keys) have the same bits, whatever else the GPU does: copies, or the
    same kernels from other streams."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    streams = [torch.cuda.Stream() for _ in range(n_streams)]
    load = torch.empty(2**26, device="cuda")
    for batch, heads, len_q, len_k in shapes:
        q, dout = (torch.randn(batch, heads, len_q, 32, device="cuda", dtype=dtype) for _ in range(2))
        k, v = (torch.randn(batch, heads, len_k, 32, device="cuda", dtype=dtype) for _ in range(2))
        bias = torch.randn(1, heads, len_q, len_k, device="cuda", dtype=dtype)
        x, o, _ = inputs_of(q=q, k=k, v=v, bias=bias)
        out, lse = forward(x, o)
        first = backward(x, o, out, lse, dout, None, True)[:4]
        torch.cuda.synchronize()
        for _ in range(20):
            found = []
            for stream in streams:
                with torch.cuda.stream(stream):
                    found += backward(x, o, out, lse, dout, None, True)[:4]
            load.mul_(1.5)
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(first * n_streams, found))


def test_results_repeat_under_load_and_in_three_streams(cuda, monkeypatch):
    monkeypatch.setattr(bwd.launch, "take_turn", lambda device: None)  # so few may run at once
    shapes = (72, 4, 500, 520), (8, 16, 768, 768), (64, 1, 900, 1000), (8, 4, 1100, 4088), (256, 4, 256, 256)
    check_repeats(fwd.forward, bwd.backward, HALF, 3, shapes)


def test_backwards_in_many_streams_end(cuda):
    """Programs of five such kernels and more could wait for each other for ever: they take turns. To 384 keys programs
    only wait for what others have begun."""
    check_repeats(fwd.forward, bwd.backward, HALF, 12, ((8, 4, 1100, 4088), (64, 4, 384, 384), (256, 4, 256, 256)))
