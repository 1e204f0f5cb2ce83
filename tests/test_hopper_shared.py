"""The Hopper kernels for a bias that many (batch, head) share, run as Python: their roles as threads that meet at
barriers, as tests/test_hopper_deep.py runs those of another kernel."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

import gluon_python as machines  # noqa: E402
from gluon_python import Box, Pointer, Whole, run, shared, wait_turn  # noqa: E402
from test_hopper_deep import Machine  # noqa: E402

from adatom.device import Device, pretend  # noqa: E402
from adatom.ops.attention import hopper_shared_bias as bias_part  # noqa: E402
from adatom.ops.attention import hopper_shared_bwd as bwd  # noqa: E402
from adatom.ops.attention import hopper_shared_fwd as fwd  # noqa: E402
from adatom.ops.attention import hopper_shared_lent as borrowed  # noqa: E402
from adatom.ops.attention import hopper_shared_rows as whole  # noqa: E402
from adatom.ops.attention import hopper_sharers as common  # noqa: E402
from adatom.ops.attention import limits, reference  # noqa: E402
from adatom.ops.attention.api import inputs_of  # noqa: E402
from adatom.ops.attention.problem import problem  # noqa: E402
from adatom.ops.attention.triton_call import Call  # noqa: E402

H100 = Device("cuda", 90, 132, 232448)
HALF, F32 = torch.bfloat16, torch.float32


def of_slices(x: Any) -> tuple[int, int, int, int, tuple[int, int]]:
    batch, heads = x.q.shape[:2]
    slices = x.bias.shape[0] * x.bias.shape[1]
    several = tuple(int(n > 1) for n in x.bias.shape[:2])
    return batch // x.bias.shape[0], x.bias.shape[1], slices, batch * heads // slices, several  # type: ignore[return-value]


def forward(x: Any, o: Any, programs: int, stays: bool = False) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """out, lse, and whether the first pass was not enough. stays: the bias, for two ranges of sharers."""
    batch, heads, len_q, _ = x.q.shape
    len_k = x.k.shape[2]
    repeats, bias_heads, slices, sharing, several = of_slices(x)
    n = fwd.SHARERS.value
    out, lse = torch.full_like(x.q, math.nan), torch.full(x.q.shape[:3], math.nan)
    stay, ranges = (-(-len_k // 128), 2) if stays else (0, -(-sharing // n))
    counts = (heads, repeats, bias_heads, sharing, ranges, len_q, len_k, -(-len_q // 128) * slices * ranges)
    some = bias_heads < heads
    boxes = Box(x.q, 128, 32), Box(x.k, 128, 32), Box(x.v, 128, 32), Box(x.bias, 128, 128)

    again = []

    def roles(machine: Machine) -> dict[str, tuple[Any, ...]]:
        ring, stages, turns = machine.barriers, 3, fwd.Q_STAGES.value
        flags = shared(torch.int64, n, 128)
        again.append(flags.x)
        machine.all = threading.Barrier(n + 1)  # type: ignore[attr-defined]
        tiles = (
            shared(HALF, turns * n, 128, 32), shared(HALF, stages * n, 128, 32), shared(HALF, stages * n, 128, 32),
            shared(HALF, stay or stages, 128, 128), flags,
        )  # fmt: skip
        bars = (
            ring(turns, n), ring(turns, n), ring(stages, 2 * n + (0 if stay else 1)), ring(stages, n),
            ring(1, stay), ring(1, n),
        )  # fmt: skip
        even, most = len_k % 128 == 0, 2.0 ** (15 if HALF == torch.float16 else 100)
        options = (tiles, bars, counts)
        return {"_producer": (*boxes, several, *options, some, stay, stages)} | {
            f"_consumer {c}": (Box(out, 128, 32), Pointer(lse), *options, o.scale, c, some, even, most, stay, stages)
            for c in range(n)
        }

    run(fwd, programs, roles)
    flags = torch.stack(again)
    assert set(flags.unique().tolist()) <= {0, 1}
    return out, lse, bool(flags.any())


def by_units(x: Any, units: Any) -> list[list[int]]:
    """The numbers of (batch, head) of each unit, in the order in which their lines of E lie."""
    heads = x.q.shape[1]
    repeats, bias_heads, slices, sharing, _ = of_slices(x)
    order = []
    for batch in range(slices // bias_heads):
        for group in range(units.groups):
            for head in range(bias_heads):
                order.append([])
                for r in range(group * units.sharers, min((group + 1) * units.sharers, sharing)):
                    counts = heads, repeats, bias_heads
                    b, h = common.sharer.fn(r, batch * bias_heads + head, counts, bias_heads < heads)
                    order[-1].append(b * heads + h)
    return order


def backward(
    x: Any, o: Any, dout: torch.Tensor, delta: torch.Tensor, lse: torch.Tensor, programs: int, parts: int, n: int
):
    """dq, dk, dv, dbias. n: sharers beside each other. The kernel of dk and dv adds parts, too; lines of E lie where it
    writes: one program after the other, or all at once, where some lines are read late."""
    batch, heads, len_q, dim = x.q.shape
    len_k = x.k.shape[2]
    repeats, bias_heads, slices, sharing, several = of_slices(x)
    some, blocks = bias_heads < heads, -(-len_q // 128)
    padded, groups = blocks * 128, -(-sharing // n)
    units = borrowed.Units(slices * groups, groups, n)
    rows, deltas = torch.full((batch * heads, padded), math.inf), torch.zeros(batch * heads, padded)
    rows[:, :len_q] = torch.where(lse == -math.inf, math.inf, lse / math.log(2)).flatten(0, 1)
    deltas[:, :len_q] = delta.flatten(0, 1)
    lines = Box(rows.view(-1), 128), Box(deltas.view(-1), 128)
    e = torch.zeros(batch * heads, padded, 8, dtype=HALF)
    for first, x32 in ((0, (rows / (o.scale * math.log2(math.e))).clamp(max=1e38)), (3, deltas)):
        for column in range(first, first + 3):
            e[:, :, column] = x32.to(HALF)
            x32 = x32 - e[:, :, column].float()
    by_unit = e[sum(by_units(x, units), [])]

    n_n = -(-len_k // 64)
    to_add, width = torch.randn(parts, *x.bias.shape), -(-len_k // 128) * 128
    in_parts = machines.parts_of(to_add, width)
    add, shares = bwd._shares(padded // 64 * slices, width, programs * n)
    stages, turns = bwd.CONFIGS[n][0], bwd.KV_STAGES.value
    given = (x.q, x.k, x.v, dout)

    def keys(at_once: bool) -> tuple[torch.Tensor, torch.Tensor]:
        dk, dv = torch.full_like(x.k, math.nan), torch.full_like(x.v, math.nan)
        lent = bwd.Lent(dk, dv)
        with pretend(H100):
            plan = lent.plan_lines(Call(x, o), x.bias, units, padded)
        there, rest = lent.take_lines(plan)
        rest.copy_(by_unit[plan.held :])
        if plan.held:
            there.copy_(by_unit[: plan.held])
        total = torch.full(x.bias.shape, math.nan, dtype=HALF)
        sums = (parts, padded // 64, width, padded // 64 * slices * width // 64, shares)
        taken = Pointer(torch.zeros(whole.COUNTERS.value, dtype=torch.int64))
        to = Pointer(in_parts), Pointer(total), taken
        stretch = plan.stretch * n_n
        stretches, late = (stretch, plan.steep, plan.less), [3.0] * (at_once and plan.steep > 0)

        def of_keys(machine: Machine) -> dict[str, tuple[Any, ...]]:
            ring = machine.barriers
            counts = (heads, repeats, bias_heads, sharing, groups, padded, len_q, len_k, n_n * units.n)
            tiles = (
                shared(HALF, stages * n, 128, 32), shared(HALF, turns * n, 64, 32), shared(HALF, stages * n, 128, 32),
                shared(HALF, turns * n, 64, 32), shared(HALF, stages * n, 128, 16), shared(HALF, 2, 64, 16),
                shared(HALF, stages, 128, 64), shared(torch.int64, turns * bwd.TOLD.value, 1),
            )  # fmt: skip
            tiles[5].x.zero_()
            tiles[5].x[0, :, :3] = tiles[5].x[1, :, 3:] = -1
            bars = ring(stages, 1 + 3 * n), ring(stages, n), ring(turns, 2 * n), ring(turns, n)
            boxes = [Box(t, m, 32) for t, m in zip(given, (128, 64, 64, 128))]
            machine.others = {"wait_turn": wait_turn}  # type: ignore[attr-defined]
            options = (some, n, stages, 128)
            stored = [Box(t, 64, 32) for t in (dk, dv)]
            places = machines.Slow(there.view(HALF), 128, 16, late), Box(rest.view(HALF), 128, 16)
            return {
                "_producer": (
                    *boxes, *places, Box(x.bias, 128, 64), taken, several, 0, plan.held, stretches, tiles, bars, counts,
                    *options, True, True,
                )
            } | {
                f"_consumer {c}": (
                    *stored, *to, sums, stretch, tiles, bars, counts, o.scale, c, *options, add, len_k % 2 == 0, True,
                    True,
                )
                for c in range(n)
            }  # fmt: skip

        run(bwd, programs, of_keys, together=at_once)
        assert torch.equal(total, sum(to_add, torch.zeros(x.bias.shape)).to(HALF))
        read = taken.x[whole.COUNTERS.value - borrowed.STRETCHES.value :]
        assert read.sum() == n_n * units.n and read.max() <= stretch
        return dk, dv

    dk, dv = keys(False)
    assert all(map(torch.equal, keys(True), (dk, dv)))
    staged = parts == 1
    dbias = torch.full(x.bias.shape, math.nan, dtype=HALF)

    biases, dq_stages = (2, 2) if n == 2 else (1, 4)
    chain, passers = -(-len_k // 128), bias_part.PASSERS.value
    link = bias_part.LINKS[n - 2]
    tiles_in_all = blocks * chain * slices * parts
    programs = -(-programs // chain) * chain if parts == 1 else tiles_in_all
    dq = torch.full_like(x.q, math.nan)
    ring_of_sums = torch.full((programs * link * 32, 128), math.nan)
    handed = torch.full((tiles_in_all * 128 * 128,), math.nan)
    done = torch.zeros((programs + 1) * bias_part.APART.value, dtype=torch.int64)

    def of_sums(machine: Machine) -> dict[str, tuple[Any, ...]]:
        machine.others = {"wait_turn": wait_turn, "pass_turn": machines.pass_turn(machine)}  # type: ignore[attr-defined]
        ring, stages = machine.barriers, bias_part.STAGES.value
        counts = (heads, repeats, bias_heads, sharing, parts, padded, len_q, len_k, tiles_in_all)
        tiles = (
            *(shared(HALF, stages, 128, 32) for _ in range(4)), shared(F32, stages, 128), shared(F32, stages, 128),
            shared(HALF, 2 * biases, 64, 128), shared(F32, dq_stages, 32, 128), shared(HALF, 2, 64, 32),
        )  # fmt: skip
        bars = ring(stages, 4), ring(stages, 2), ring(biases, 2), ring(biases, 2)
        dq_bars = ring(dq_stages, 1), ring(dq_stages, 2), ring(dq_stages, 1), ring(1, 1)
        boxes = [Box(t, 128, 32) for t in given]
        even = len_k % 128 == 0
        options = (Whole(machine.pid), slices, counts)
        into: Any = Box(dbias, 64, 128) if staged else Pointer(dbias)
        ring_and_done = (Box(ring_of_sums, 32, 128), Pointer(done), tiles[7])
        sums = (into, Pointer(handed), Pointer(done), tiles)
        return {
            "_producer": (*boxes, *lines, Box(x.bias, 64, 128), several, tiles, bars, *options, some, biases),
            "_fetcher": (*ring_and_done, dq_bars, machine.pid, link, slices, counts, dq_stages),
        } | {
            f"_consumer {c}": (
                *sums, bars, dq_bars, *options, o.scale, c, some, even, parts > 1, staged, biases, dq_stages
            )
            for c in range(2)
        } | {
            f"_passer {p}": (
                Box(dq, 64, 32), *ring_and_done, tiles[8], dq_bars, Whole(machine.pid), link, slices, counts, p, some,
                dq_stages,
            )
            for p in range(passers)
        }  # fmt: skip

    run(bias_part, programs, of_sums, together=True)
    return dq, dk, dv, dbias


def rows(x: Any, o: Any, out: torch.Tensor, dout: torch.Tensor, lse: torch.Tensor, programs: int, parts: int, n: int):
    """dq, dbias, and lse and delta in E, of the kernel whose programs take all of 128 n keys."""
    heads, len_q = x.q.shape[1:3]
    len_k = x.k.shape[2]
    repeats, bias_heads, slices, sharing, several = of_slices(x)
    some, padded = bias_heads < heads, -(-len_q // 128) * 128
    dq = torch.full_like(x.q, math.nan)
    staged, sharers = parts == 1, parts + 1
    taken = torch.full((whole.COUNTERS.value,), 7)
    dbias = torch.full(x.bias.shape, math.nan, dtype=HALF)
    lines = torch.full((x.q.shape[0] * heads * padded, 2), math.nan)
    counts = (heads, repeats, bias_heads, sharing, parts, padded, len_q, len_k, padded // 64 * slices * parts)
    in_parts = torch.full((parts if parts > 1 else 0, padded // 64 * slices, 2 * n, 64 * 64), math.nan)
    in_lent = min(slices * sharers, len(lines) // padded - 1)
    into: Any = Box(dbias, 64, 64) if staged else Pointer(dbias)
    places = [Pointer(t) for t in lines.split((in_lent * padded, len(lines) - in_lent * padded))]
    boxes = [Box(t, n, 32) for t, n in ((x.q, 64), (x.k, 128), (x.v, 128), (out.to(HALF), 64), (dout, 64))]

    def write_lines(at, m0, lse, delta, inverse):
        at.x[at.at // 4 + m0 + torch.arange(64)] = torch.stack((lse * inverse, delta), 1).as_subclass(torch.Tensor)

    def roles(machine: Machine) -> dict[str, tuple[Any, ...]]:
        machine.others = {"_write_lines": write_lines}  # type: ignore[attr-defined]
        ring, stages = machine.barriers, 2
        tiles = (
            *(shared(HALF, stages * m, rows, 32) for m, rows in ((1, 64), (n, 128), (n, 128), (1, 64), (1, 64))),
            shared(F32, stages, 64), shared(HALF, n, 64, 128), shared(HALF, 64, 32), shared(F32, 16, 128),
        )  # fmt: skip
        bars = (
            ring(stages, 3 + 2 * n), ring(stages, 2), ring(1, n), ring(1, 2), ring(1, 1), ring(1, 1)
        )  # fmt: skip
        given = (*boxes, Box(lse.float().view(-1), 64), Box(x.bias, 64, 128), Pointer(taken), several)
        options = (tiles, bars, slices, counts)
        even = len_k % (128 * n) == 0
        names = machine.python()  # what the kernel asks for ahead of its producer
        piece, part, m0 = names["_tile"](machine.pid, slices, counts)
        names["_load_bias"](given[6], several, piece, m0, bars[2], tiles[6], counts, n)
        names["_load_sharer"](*given[:6], 0, part, piece, m0, bars[0], tiles, counts, some, n)
        return {"_producer": (*given, *options, some, True, n, stages)} | {
            f"_consumer {c}": (
                None, *places, into, Pointer(in_parts), Box(dq, 64, 32), tiles, bars, slices, in_lent, counts, o.scale,
                1.0, c, some, sharers, even, parts > 1, staged, True, False, n, stages,
            )
            for c in range(2)
        }  # fmt: skip

    run(whole, programs, roles)
    assert not taken.any()
    total = dbias.double() if staged else machines.sum_of_parts(in_parts, x.bias.shape)
    found = torch.full((x.q.shape[0] * heads, padded, 2), math.nan)
    groups = -(-sharing // sharers)
    found[sum(by_units(x, borrowed.Units(slices * groups, groups, sharers)), [])] = lines.view(found.shape)
    return dq, total, found.view(*x.q.shape[:2], padded, 2)


CASES = (
    ((22, 1), (1, 1), (130, 136), (32, 32), True),  # more sharers than a chain's ring has places
    ((2, 2), (1, 2), (128, 264), (32, 32), False),
    ((3, 2), (1, 1), (64, 264), (24, 32), True),
    ((4, 1), (2, 1), (200, 128), (32, 24), True),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_roles(case):
    (batch, heads), shape, (len_q, len_k), (dim, dim_v), masked = case
    torch.manual_seed(0)
    q, k = (torch.randn(batch, heads, n, dim).to(HALF) for n in (len_q, len_k))
    v, dout = (torch.randn(batch, heads, n, dim_v).to(HALF) for n in (len_k, len_q))
    bias = torch.randn(*shape, len_q, len_k).to(HALF)
    if masked:
        bias[..., 3, :] = -math.inf  # sees nothing
        bias[..., 5, :90] = -1e9
    x, o, _ = inputs_of(q=q, k=k, v=v, bias=bias)
    exact = x._replace(q=q.double(), k=k.double(), v=v.double(), bias=bias.double())
    out, lse = reference.forward(exact, o)
    want = reference.backward(exact, o, out, lse, dout.double(), None, True)[:4]
    delta = (out * dout.double()).sum(-1)
    if dim == dim_v:
        for programs, stays in ((1, False), (3, False), (1, True), (3, True)):
            got, got_lse, repeated = forward(x, o, programs, stays)
            assert repeated == masked
            assert ((got.double() - out).norm() / out.norm()).item() < 0.01
            assert torch.allclose(got_lse.double(), lse, atol=1e-4)
    for programs, parts, sharers in ((1, 1, 3), (3, 3, 3), (3, 2, 2)):
        results = backward(x, o, dout, delta, lse, programs, parts, sharers)
        for name, got, true in zip(("dq", "dk", "dv", "dbias"), results, want):
            error = ((got.double() - true).norm() / true.norm()).item()
            assert error < 0.01, (name, error)
    for programs, parts, n in ((1, 1, 2 + (len_k > 256)), (3, 2, 3)):
        *results, lines = rows(x, o, out, dout, lse, programs, parts, n)
        for name, got, true in zip(("dq", "dbias"), results, (want[0], want[3])):
            error = ((got.double() - true).norm() / true.norm()).item()
            assert error < 0.01, (name, error)
        seen = lse > -1e6
        assert torch.allclose(lines[:, :, :len_q, 1].double(), delta, atol=0.05)
        assert torch.allclose(lines[:, :, :len_q, 0].double()[seen], lse[seen] / math.log(2), atol=1e-3)
        assert (lines[:, :, len_q:, 0] == math.inf).all() and (lines[:, :, :len_q, 0][~seen] == math.inf).all()


@pytest.mark.parametrize("sms", [16, 60, 114, 132])
def test_a_chain_is_a_part_of_the_multiprocessors(sms):
    """Up to the longest that is taken there are programs for it, three times over beside another's begun ones."""
    device = H100._replace(sms=sms)
    for n in (512, 1024, 2048, 4096, 8192):
        q = torch.empty(256, 4, n, 32, dtype=HALF, device="meta")
        with pretend(device):
            x, o, _ = inputs_of(q=q, k=q, v=q, bias=q[:1, ..., :1].expand(1, 4, n, n))
            if n <= 32 * sms:
                launch, ring, _ = bias_part.sums_launch(Call(x, o), x.bias, n, 2**21)
                assert ring == launch.programs * 128 * 32 * (4 if launch.programs <= 128 else 2)
                assert 0 < launch.programs <= sms and launch.programs % (n // 128) == 0
                assert 3 * (n // 128 - 1) < sms
            why = limits.hopper_shared_bwd(problem(x, o, True)._replace(bias_tma=True))
            assert (why is None) == (n <= 32 * sms), why


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_far_queries_are_left_to_the_exact_pass(dtype, monkeypatch):
    """Keys masked at the beginning or the end are none of its concern, unless nothing else is seen; what the first keys
    are no measure for is. In bfloat16 their bias is the measure, in float16 their scores."""
    monkeypatch.setitem(globals(), "HALF", dtype)
    lowest, narrow = torch.finfo(HALF).min, dtype == torch.float16
    for at, repeats, far, size, large in (
        *((slice(0, 64), False, far, 1, 1) for far in (-1e9, -1e15, -math.inf)),
        (slice(0, 64), narrow, lowest, 1, 1),  # float16's is not far enough not to be a measure
        (slice(0, 200), not narrow, lowest, 1, 1),
        (slice(64, 200), False, lowest, 1, 1),
        (slice(0, 64), False, 300.0, 1, 1),
        (slice(64, 200), True, 1000.0, 1, 1),
        (slice(64, 200), narrow, 20.0, 1, 1),
        (slice(64, 200), narrow, 60.0, 1, 1),
        (slice(64, 200), True, 60.0, 1, 2.0**45),  # a sum may be small enough and P V infinite
        (slice(0, 0), False, 0.0, 3, 1),
    ):
        q, k, v = (torch.randn(2, 1, 128, 32).to(HALF), *(torch.randn(2, 2, 1, 200, 32).to(HALF)))
        q *= size
        v *= 1 if narrow else large
        bias = torch.randn(1, 1, 128, 200).to(HALF)
        bias[..., 7, at] = far
        x, o, _ = inputs_of(q=q, k=k, v=v, bias=bias)
        exact = x._replace(q=q.double(), k=k.double(), v=v.double(), bias=bias.double())
        out, lse = reference.forward(exact, o)
        got, got_lse, repeated = forward(x, o, 1)
        assert repeated == repeats
        assert ((got.double() - out).norm() / out.norm()).item() < 0.01
        assert torch.allclose(got_lse.double(), lse, atol=1e-4)


@pytest.mark.parametrize(
    "options, forward_word, backward_word",
    [
        ({}, None, None),
        ({"length": 300}, None, None),
        ({"length": 256, "batch": 64}, None, None),
        ({"length": 200}, "256", "256"),
        ({"batch": 8}, "8 batch", "8 batch"),
        ({"batch": 8, "length": 2048}, None, None),
        ({"batch": 8, "length": 5000}, None, "4096 keys"),
        ({"batch": 5, "length": 2048}, None, None),  # rounded up
        ({"batch": 4, "length": 4096}, "8 batch", "8 batch"),
        ({"dim": 40}, "head_dims", "head_dims"),
        ({"causal": True}, "no mask", "no mask"),
        ({"bias_heads": 4, "bias_batch": 32}, "share", "share"),
        ({"bias_dtype": F32}, "q's dtype", "q's dtype"),
        ({"bias_grad": False}, None, "nobody wants"),
    ],
    ids=str,
)
def test_limits(options, forward_word, backward_word):
    n, batch, dim = options.get("length", 512), options.get("batch", 32), options.get("dim", 32)
    q = torch.empty(batch, 4, n, dim, dtype=HALF, device="meta")
    shape = options.get("bias_batch", 1), options.get("bias_heads", 4), n, -(-n // 8) * 8
    bias = torch.empty(shape, dtype=options.get("bias_dtype", HALF), device="meta")[..., :n]
    with pretend(H100):
        x, o, _ = inputs_of(q=q, k=q, v=q, bias=bias, causal=options.get("causal", False))
        posed = problem(x, o, options.get("bias_grad", True))
    for unfit, word in ((limits.hopper_shared_fwd, forward_word), (limits.hopper_shared_bwd, backward_word)):
        why = unfit(posed)
        assert (why is None) if word is None else word in why, why
