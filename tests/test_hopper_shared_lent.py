"""The memory that the backward under a shared bias borrows from its results, and its kernels on a GPU: gradients that
repeat whatever else runs, and streams that end."""

from __future__ import annotations

import math
import random

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from test_hopper_shared import H100, HALF  # noqa: E402

from adatom.device import pretend  # noqa: E402
from adatom.ops.attention import hopper_shared_bwd as bwd  # noqa: E402
from adatom.ops.attention import hopper_shared_fwd as fwd  # noqa: E402
from adatom.ops.attention import hopper_sharers as common  # noqa: E402
from adatom.ops.attention import limits, reference  # noqa: E402
from adatom.ops.attention.api import inputs_of  # noqa: E402
from adatom.ops.attention.problem import problem  # noqa: E402


def laid(shape, order, dim):
    """(batch, heads, length, dim), which lie in memory in that order."""
    t = torch.empty(*(shape[i] for i in order), dim, dtype=HALF, device="meta")
    return t.permute(*map(order.index, range(3)), 3)


def test_what_dk_and_dv_lend_is_stored_last():
    """No tile ahead of the first that waits touches it, it does not overlap, and every call takes what was planned."""
    choose, seen = (
        random.Random(0),
        dict.fromkeys(("whole", "longer", "some wait", "no room", "one part, not staged"), 0),
    )
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
            planned, again = bwd._Lent(dk, dv), bwd._Lent(dk, dv)
            plan = bwd._launches(x, o, out, out, False, planned)
        begin, taken = {id(t): t.numel() for t in (dk, dv)}, [again.take(n) for n in plan.lent]
        assert [(id(t), end) for t, end in planned.free] == [(id(t), end) for t, end in again.free]
        for part in taken:  # one below the other
            for t in (dk, dv):
                if part.untyped_storage()._cdata == t.untyped_storage()._cdata:
                    assert 2 * (part.storage_offset() + part.numel()) == begin[id(t)] and part.storage_offset() % 4 == 0
                    begin[id(t)] = 2 * part.storage_offset()
        names = plan.keys.kernel.arg_names
        given = dict(zip(names[names.index("bias_b") :], plan.keys.scalars))
        slices, sharers = math.prod(shape), plan.keys.meta["SHARERS"]
        for t in range(min(given["lent"], given["n_tiles"])):
            group = t // -(-len_k // 64)
            piece, first = group % slices, group // slices * sharers
            n_end = min((t % -(-len_k // 64) + 1) * 64, len_k)
            for r in range(first, min(first + sharers, given["shared"])):
                b, h = common.sharer.fn(r, piece, (heads, given["repeats"], shape[1]), shape[1] < heads)
                for d in (dk, dv):
                    last = b * d.stride(0) + h * d.stride(1) + (n_end - 1) * d.stride(2) + d.shape[3]
                    assert last <= begin[id(d)]
        seen["some wait"] += 0 < given["lent"] < given["n_tiles"]
        seen["no room"] += sum(plan.lent) * 2 > sum(t.numel() - begin[id(t)] for t in (dk, dv))
        seen["longer" if plan.before else "whole"] += 1
        if plan.before is None:
            names = plan.sums.kernel.arg_names
            held = dict(zip(names[names.index("bias_b") :], plan.sums.scalars))["held"]
            several = plan.sums.parts > 1
            assert held == (given["held"] if several else slices)
            assert plan.lent == (
                (held * len_q * len_k, (plan.sums.parts * slices - held) * len_q * len_k) if several else ()
            )
            seen["one part, not staged"] += not several and not plan.sums.meta["STAGED"]


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
