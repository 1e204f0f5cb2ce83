"""The Hopper forward beyond head_dim 128, run as Python (see test_hopper_deep.py): a producer and two consumers."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from test_hopper_deep import (  # noqa: E402
    F32,
    H100,
    PLAIN,
    Lens,
    Machine,
    Shared,
    Tensor4,
    bound,
    clear_rows,
    register,
    shared,
)

from adatom import registry  # noqa: E402
from adatom.device import pretend  # noqa: E402
from adatom.ops.attention import hopper_deep_fast as fast  # noqa: E402
from adatom.ops.attention import hopper_deep_fwd as deep  # noqa: E402
from adatom.ops.attention import (  # noqa: E402
    hopper_deep_tiles,
    hopper_fast_tiles,
    hopper_fwd,
    hopper_fwd_tiles,
    limits,
    reference,
)
from adatom.ops.attention.api import inputs_of  # noqa: E402
from adatom.ops.attention.problem import empty_out, problem  # noqa: E402
from adatom.tiles import hopper  # noqa: E402

PYTHON = "clear_rows", "named_sync", "named_arrive", "as_box", "as_matrix"  # what is written for this machine


class Int(int):
    """A scalar of device code."""

    def to(self, dtype: Any) -> Int:
        return self


class At:
    """A pointer to numbers, with offsets."""

    def __init__(self, x: torch.Tensor, at: Any = 0) -> None:
        self.x, self.at = x, at

    def __add__(self, more: Any) -> At:
        return At(self.x, self.at + more)


def either(ints, tensors):
    """Of two numbers, or of tensors and numbers."""

    def function(*values):
        if not any(map(torch.is_tensor, values)):
            return ints(*values)
        return tensors(*(v if torch.is_tensor(v) else torch.tensor(v) for v in values))

    return function


def load(at: Any) -> torch.Tensor:
    return at.x[at.at] if isinstance(at, At) else at


def store(at: At, x: Any, mask: torch.Tensor | None = None) -> None:
    if mask is None:
        at.x[int(at.at)] = int(x)
    else:
        at.x.view(-1)[at.at[mask]] = x[mask].as_subclass(torch.Tensor)


def atomic_add(at: At, n: int, sem: str) -> Int:
    at.x[int(at.at)] += n
    return Int(at.x[int(at.at)] - n)


class Forward(Machine):
    """A multiprocessor for the forward: named barriers count threads."""

    def __init__(self, pid: int, programs: int, seed: int) -> None:
        super().__init__(pid, seed)
        self.programs, self.came = programs, {}

    def come(self, number: int, threads: int, wait: bool) -> None:
        mine = 32 if threading.current_thread().name == "_producer" else 128
        with self.changed:
            rounds, count = self.came.get(number, (0, 0))
            count += mine
            assert count <= threads
            self.came[number] = (rounds + 1, 0) if count == threads else (rounds, count)
            self.changed.notify_all()
            if wait and not self.changed.wait_for(lambda: self.came[number][0] > rounds, timeout=10):
                raise TimeoutError("waits for ever")

    def python(self, kernel: Any = deep) -> dict[str, Any]:
        names = super().python()
        language = SimpleNamespace(**vars(names["gl"]))
        vars(language).update(
            minimum=either(min, torch.minimum), maximum=either(max, torch.maximum),
            where=lambda c, a, b: torch.where(c, a, b) if torch.is_tensor(c) else a if c else b,
            full=lambda shape, x, dtype, layout: register(torch.full(shape, x, dtype=dtype)), log2=torch.log2,
            max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis), barrier=lambda: None, load=load,
            store=store, num_programs=lambda axis: self.programs, DotOperandLayout=lambda *a: None,
            BlockedLayout=lambda *a: None, convert_layout=lambda x, layout, assert_trivial=False: x,
            atomic_add=atomic_add, zeros_like=torch.zeros_like, join=lambda a, b: torch.stack((a, b), -1),
            split=lambda x: x.unbind(-1),
        )  # fmt: skip
        names.update(
            gl=language, LN2=math.log(2), ROWS=64, TURN=8, ALL=10, MOST=2.0**64, NONE=0, LOW=0.5, SAFE=2.0**20,
            HIGH=2.0**64, as_matrix=lambda layout: layout, clear_rows=clear_rows,
            named_sync=lambda number, threads: self.come(number, threads, True),
            named_arrive=lambda number, threads: self.come(number, threads, False),
        )  # fmt: skip
        for module in (hopper, hopper_fwd_tiles, hopper_fast_tiles, hopper_deep_tiles, kernel):
            for name, function in vars(module).items():
                if hasattr(function, "fn") and name not in PYTHON:
                    names[name] = bound(function, names)
        tile = names["tile_of"]
        names["tile_of"] = lambda *a: tuple(Int(n) for n in tile(*a))
        return names

    def play(self, kernel: Any, consumers: list[Any], producer: Any) -> None:
        """Run the roles of a program, with these arguments, as threads."""
        python, failed = self.python(kernel), []

        def role(name: str, *args: Any) -> None:
            try:
                python[name](*args)
            except Exception as error:
                failed.append(error)

        roles = [("_consumer", args) for args in consumers] + [("_producer", producer)]
        threads = [threading.Thread(target=role, name=name, args=(name, *args)) for name, args in roles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]


def run(x, o, config: deep.Config, programs: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the kernel, its programs one after the other."""
    batch, heads, len_q, dim = x.q.shape
    kv_heads, len_k, dim_v = x.v.shape[1:]
    hq, hv = (64 if dim <= 192 else 128), next(h for h in (0, 64, 128) if dim_v <= 128 + h)
    left, right = o.window_left, (0 if o.causal else o.window_right)
    lens = None if x.kv_lens is None else Lens(x.kv_lens.tolist())
    masked = left >= 0 or right >= 0 or lens is not None or len_k % config.block_n > 0
    sure = config.sure and x.q.dtype == torch.bfloat16
    plan = hopper_deep_tiles.Plan(
        0, False, True, left >= 0, right >= 0, masked, x.sinks is not None, lens is not None, False, 0, 2, 64,
        config.block_n, 128, hq, hv, config.q_slots, config.lo_slots, config.hi_slots, sure,
    )  # fmt: skip
    half, n_tiles = x.q.dtype, math.ceil(len_q / 128) * batch * heads
    out = torch.full((batch, heads, len_q, dim_v), math.nan, dtype=half)
    lse = torch.full((batch, heads, len_q), math.nan)
    sinks = None if x.sinks is None else At(x.sinks)
    sizes = (heads, kv_heads, batch * heads, 3, len_q, len_k, left, right)
    for pid in range(programs):
        machine = Forward(pid, programs, seed)
        tiles, bars = rings(machine, half, config, 128, hq)
        given = (sinks, lens, None)
        shared_by_all = (tiles, bars, sizes, n_tiles)
        consumers = [((Tensor4(out), None, At(lse), 0, 0), given, *shared_by_all, o.scale, c, plan) for c in (0, 1)]
        inputs = [(Tensor4(t),) * 2 for t in (x.q, x.k, x.v)]
        machine.play(deep, consumers, (*inputs, lens, None, *shared_by_all, plan))
    return out, lse


def run_fast(x, o, config: deep.Config, programs: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the kernel without maxima."""
    batch, heads, len_q, dim = x.q.shape
    kv_heads, len_k, dim_v = x.v.shape[1:]
    low = 128 if dim > 128 else 64
    hq, hv = (next(h for h in (0, low // 2, low) if d <= low + h) for d in (dim, dim_v))
    masked = o.causal or len_k % config.block_n > 0
    one = config.block_n == 64
    slots = (8, 8, 8) if one else (config.q_slots, config.lo_slots, config.hi_slots)
    plan = hopper_deep_tiles.Plan(
        0, False, True, False, o.causal, masked, x.sinks is not None, False, False, 0, 2, 64,
        config.block_n, low, hq, hv, *slots, False, config.q_slots + config.lo_slots - 2 if one else 0,
    )  # fmt: skip
    half, n_tiles = x.q.dtype, math.ceil(len_q / 128) * batch * heads
    out = torch.full((batch, heads, len_q, dim_v), math.nan, dtype=half)
    lse = torch.full((batch, heads, len_q), math.nan)
    sinks = None if x.sinks is None else At(x.sinks)
    sizes = (heads, kv_heads, batch * heads, 3, len_q, len_k, 0, 0)
    taken = torch.full((1 + 3 * n_tiles,), 7, dtype=torch.int32)
    taken[0] = 0
    for pid in range(programs):
        machine = Forward(pid, programs, seed)
        tiles, bars = (one_ring if one else rings)(machine, half, config, low, hq)
        numbers = Shared(torch.zeros(slots[0], dtype=torch.int32), [slots[0], 1], PLAIN)
        some = (At(taken), numbers, tiles, bars, sizes, n_tiles)
        outs = Tensor4(out), Tensor4(out, min(hv, 64)), At(lse)
        consumers = [(outs, sinks, *some, o.scale, c, o.causal, plan) for c in (0, 1)]
        inputs = [(Tensor4(t), Tensor4(t, min(hq, 64))) for t in (x.q, x.k, x.v)]
        machine.play(fast, consumers, (*inputs, *some, o.causal, programs % 2 == 1, plan))
    return out, lse


def rings(machine: Forward, half: torch.dtype, config: deep.Config, low: int, high: int) -> tuple[Any, Any]:
    """Shared memory and its barriers."""
    ring = machine.barriers
    tiles = (
        shared(half, config.q_slots, 64, low), shared(half, config.q_slots, 64, high),
        shared(half, config.lo_slots, config.block_n, low), shared(half, config.hi_slots, config.block_n, high),
        deep_flags(),
    )  # fmt: skip
    return tiles, (ring(config.q_slots, 1), ring(config.q_slots, 1), ring(config.lo_slots, 1), ring(config.lo_slots, 2))


def one_ring(machine: Forward, half: torch.dtype, config: deep.Config, low: int, high: int) -> tuple[Any, Any]:
    """The same where queries, keys and values share slots."""
    n = config.q_slots + config.lo_slots
    lo, hi = (shared(half, n, 64, columns) for columns in (low, high))
    full, empty = machine.barriers(n, 1), machine.barriers(n, 2)
    return (lo, hi, lo, hi, deep_flags()), (full, empty, full, empty)


def deep_flags():
    flags = shared(F32, 2, 64, layout=PLAIN)
    flags.flat = torch.zeros(128, dtype=torch.int32)
    flags.dtype = torch.int32
    return flags


CASES = (
    ((256, 256), (130, 200), 1, {}),
    ((256, 256), (257, 320), 1, {"causal": True}),
    ((192, 128), (200, 450), 2, {"causal": True}),
    ((136, 192), (150, 140), 1, {"window": (70, 20)}),
    ((256, 136), (70, 190), 1, {"kv_lens": [100, 0], "causal": True, "sinks": True}),
    ((192, 192), (300, 300), 1, {"window": (3, 2)}),
    ((160, 72), (300, 700), 1, {"grows": 300.0}),
    ((256, 192), (200, 300), 1, {"grows": 300.0, "causal": True}),
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_roles(case, dtype):
    (dim, dim_v), (len_q, len_k), sharing, options = case
    torch.manual_seed(0)
    options = dict(options)
    grows = options.pop("grows", None)
    if "kv_lens" in options:
        options["kv_lens"] = torch.tensor(options["kv_lens"]).int()
    if "sinks" in options:
        options["sinks"] = torch.randn(2 * sharing)
    q = torch.randn(2, 2 * sharing, len_q, dim).to(dtype)
    k, v = (torch.randn(2, 2, len_k, d).to(dtype) for d in (dim, dim_v))
    if grows:  # scores far above those of the keys that are seen first
        k[:, :, len_k // 3] *= grows
    x, o, _ = inputs_of(q=q, k=k, v=v, **options)
    out, lse = reference.forward(x._replace(q=q.double(), k=k.double(), v=v.double()), o)
    if x.kv_lens is not None:  # what lies beyond them may be anything
        for b, n in enumerate(x.kv_lens.tolist()):
            x.k[b, :, n:] = x.v[b, :, n:] = math.nan
    configs = {table[0] for (d, _), table in deep.CONFIGS.items() if (dim <= 192) == (d == 192)}
    for programs, config in enumerate(sorted(configs | {deep.Config(64, 3, 3, 2, True)}), 1):
        got = run(x, o, config, programs, programs)
        for name, mine, true in zip(("out", "lse"), got, (out, lse)):
            assert torch.equal(mine.isfinite(), true.isfinite()), name
            finite = true.isfinite()
            error = ((mine.double() - true)[finite].norm() / true[finite].norm().clamp(min=1e-30)).item()
            assert error < 0.01, (name, error, config)


def test_what_fits_in_shared_memory():
    for (dim, _), table in deep.CONFIGS.items():
        for config in table.values():
            columns = 64 * config.q_slots * dim
            columns += config.block_n * (config.lo_slots * 128 + config.hi_slots * (dim - 128))
            assert columns * 2 + 2048 <= H100.shared_memory, config
    for dim, config in deep.FAST.items():
        assert config.lo_slots == config.hi_slots, config  # a use has both halves in one slot
        assert config.block_n > 64 or config.q_slots == 2 and config.lo_slots <= 6, config  # in 4 bits a use
        assert (64 * config.q_slots + config.block_n * config.lo_slots) * dim * 2 + 2048 <= H100.shared_memory, config


@pytest.mark.parametrize("dim, length, together", [(256, 1024, 16), (192, 4096, 16), (256, 8192, 8), (96, 2048, 8)])
def test_heads_together(dim, length, together):
    """Short causal lengths need more heads side by side for their programs to end together."""
    with pretend(H100):
        q = torch.empty(32768 // length, 8, length, dim, dtype=torch.bfloat16, device="meta")
        x, o, _ = inputs_of(q=q, k=q, v=q, causal=True)
        assert deep._launches(x, o, empty_out(x.q, x.v)).main.scalars[3] == together


FAST = (
    ((256, 256), (130, 200), 1, {}),
    ((256, 256), (384, 384), 2, {"causal": True}),
    ((192, 192), (300, 450), 1, {"sinks": True}),
    ((192, 128), (256, 384), 2, {"causal": True, "sinks": True}),
    ((96, 80), (256, 256), 1, {"causal": True}),
    ((72, 64), (200, 500), 2, {}),
    ((96, 96), (384, 384), 1, {"causal": True, "grows": 300.0}),
    ((256, 200), (384, 512), 1, {"causal": True, "grows": 300.0}),
    ((160, 192), (300, 700), 1, {"grows": 300.0}),
    ((256, 256), (300, 300), 1, {"causal": True}),
    ((208, 128), (129, 257), 1, {"causal": True, "sinks": True}),
    ((192, 192), (300, 428), 1, {"causal": True, "grows": 300.0}),
)


@pytest.mark.parametrize("case", FAST, ids=str)
def test_roles_without_maxima(case):
    (dim, dim_v), (len_q, len_k), sharing, options = case
    torch.manual_seed(0)
    options = dict(options)
    grows = options.pop("grows", None)
    if "sinks" in options:
        options["sinks"] = torch.randn(2 * sharing)
    q = torch.randn(2, 2 * sharing, len_q, dim).bfloat16()
    k, v = (torch.randn(2, 2, len_k, d).bfloat16() for d in (dim, dim_v))
    if grows:
        k[:, :, len_k // 3] *= grows
    x, o, _ = inputs_of(q=q, k=k, v=v, **options)
    out, lse = reference.forward(x._replace(q=q.double(), k=k.double(), v=v.double()), o)
    usual = deep.FAST[next(d for d in deep.FAST if max(dim, dim_v) <= d)]
    other = deep.Config(64 if usual.block_n > 64 else 128, 4, 4, 4, True)
    configs = usual, usual, deep.Config(64, 2, 4, 4, True), other
    for programs, config in enumerate(configs, 1):
        got = run_fast(x, o, config, programs, programs)
        for name, mine, true in zip(("out", "lse"), got, (out, lse)):
            error = ((mine.double() - true).norm() / true.norm()).item()
            assert error < 0.01, (name, error, config)


def test_a_tile_is_its_own():
    """What one head's scores are does not change another's results, whichever program has both."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 3, 300, 96).bfloat16() for _ in range(3))
    calm, *_ = inputs_of(q=q, k=k, v=v)
    x, o, _ = inputs_of(q=q, k=k.clone(), v=v)
    x.k[:, 0, 100] *= 300.0
    want = run_fast(calm, o, deep.FAST[96], 1, 1)
    for programs in (1, 2, 3):
        for mine, true in zip(run_fast(x, o, deep.FAST[96], programs, programs), want):
            assert torch.equal(mine[:, 1:], true[:, 1:])
            assert not torch.equal(mine[:, 0], true[:, 0])


@pytest.mark.parametrize(
    "dims, options, word",
    [
        ((256, 256), {}, None),
        ((192, 128), {"causal": True}, None),
        ((136, 192), {}, None),
        ((128, 128), {}, "head_dim"),
        ((192, 256), {}, "head_dim"),
        ((256, 64), {}, "head_dim"),
        ((256, 256), {"bias": torch.zeros(1, 1, 1, 512, dtype=torch.bfloat16)}, "bias"),
        ((256, 256), {"softcap": 3.0}, "softcap"),
        ((256, 256), {"dtype": F32}, "float32"),
    ],
    ids=str,
)
def test_what_it_takes(dims, options, word):
    dtype = options.pop("dtype", torch.bfloat16)
    q, k, v = (torch.zeros(8, 8, 512, d, dtype=dtype) for d in (dims[0], *dims))
    with pretend(H100):
        x, o, _ = inputs_of(q=q, k=k, v=v, **options)
        why = limits.hopper_deep_fwd(problem(x, o))
    assert why is None if word is None else word in why


@pytest.mark.parametrize(
    "lengths, options",
    [((1024, 1024), {}), ((1100, 1228), {"causal": True}), ((2048, 2048), {"window": (255, 128)}), ((512, 512), {})],
    ids=str,
)
def test_every_width_has_a_launch(lengths, options):
    """Whatever the widths, the row that takes the call knows how to launch it."""
    rows = {"hopper": hopper_fwd, "hopper_deep": deep}
    with pretend(H100):
        for dim in range(8, 257, 8):
            for dim_v in range(8, 257, 8):
                q, k = (torch.empty(8, 8, n, dim, dtype=torch.bfloat16, device="meta") for n in lengths)
                v = torch.empty(8, 8, lengths[1], dim_v, dtype=torch.bfloat16, device="meta")
                x, o, _ = inputs_of(q=q, k=k, v=v, **options)
                row = rows.get(registry.choose("attention_fwd", problem(x, o), None).backend)
                if row is not None:
                    plan = row._launches(x, o, empty_out(x.q, x.v))
                    assert plan.main.programs > 0, (dim, dim_v)
