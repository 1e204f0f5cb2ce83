"""The Hopper forward without maxima, run as Python: its producer and consumers as threads that meet at barriers."""

from __future__ import annotations

import math
import threading
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from test_hopper_deep import Machine, Shared, Tensor4, bound, clear_rows, register, shared, where  # noqa: E402

from adatom.device import Device, pretend  # noqa: E402
from adatom.ops.attention import hopper_fast_tiles as fast_tiles  # noqa: E402
from adatom.ops.attention import hopper_fwd_fast as fast  # noqa: E402
from adatom.ops.attention import hopper_fwd_plan as plan  # noqa: E402
from adatom.ops.attention import hopper_fwd_tiles as tiles  # noqa: E402
from adatom.ops.attention import reference  # noqa: E402
from adatom.ops.attention.api import inputs_of  # noqa: E402
from adatom.ops.attention.triton_call import Call  # noqa: E402
from adatom.tiles import hopper  # noqa: E402

H100 = Device("cuda", 90, 132, 232448)
PROGRAMS = 2


class Box(Tensor4):
    """A descriptor of tiles of so many rows."""

    def __init__(self, x: torch.Tensor, rows: int) -> None:
        super().__init__(x)
        self.block_type = SimpleNamespace(shape=[1, 1, rows, x.shape[-1]], nbytes=rows * x.shape[-1] * x.element_size())


class Address:
    """A pointer, or pointers."""

    def __init__(self, x: torch.Tensor, at: Any = 0) -> None:
        self.x, self.at = x, at

    def __add__(self, n: Any) -> Address:
        return Address(self.x, self.at + n)

    def load(self, mask: Any = True, other: float = 0.0) -> torch.Tensor:
        at, mask = torch.broadcast_tensors(torch.as_tensor(self.at), torch.as_tensor(mask))
        return torch.where(mask, self.x[torch.where(mask, at, 0)], other).to(self.x.dtype)

    def store(self, value: torch.Tensor, mask: torch.Tensor) -> None:
        self.x[self.at[mask]] = value[mask]

    def add(self, n: int) -> torch.Tensor:
        before = self.x[self.at].clone()
        self.x[self.at] += n
        return before


class Turns:
    """Named barriers, which so many threads complete; a warpgroup has 128."""

    def __init__(self) -> None:
        self.changed, self.came, self.laps = threading.Condition(), [0] * 16, [0] * 16

    def come(self, number: int, threads: int, wait: bool) -> None:
        with self.changed:
            lap = self.laps[number]
            self.came[number] += 128
            if self.came[number] == threads:
                self.came[number], self.laps[number] = 0, lap + 1
                self.changed.notify_all()
            elif wait and not self.changed.wait_for(lambda: self.laps[number] != lap, timeout=10):
                raise TimeoutError("waits for its turn for ever")


def either(tensors: Any, numbers: Any) -> Any:
    """A function of two tensors, or of two numbers of a program."""
    return lambda a, b: tensors(a, b) if getattr(a, "ndim", 0) and getattr(b, "ndim", 0) else numbers(a, b)


def store_rows(X: Address, tile: Shared, start: Any, rows: Any, stride: int, dim: int) -> None:
    assert rows < tile.shape[0], "whole tiles leave by TMA"
    for i in range(rows):
        X.x[X.at + (start + i) * stride + torch.arange(dim)] = tile.load()[i, :dim]


def table(x: Any, rows: int) -> torch.Tensor:
    """The lines of packed tiles, in any order; the first holds their number, and a counter."""
    lines = [[0] * 8]
    for begin, end, begin_k, end_k in zip(*(cu[i:] for cu in x[-2:] for i in (0, 1))):
        for block in range(0, end - begin, rows):
            lines += [[block, begin, begin_k, end - begin, end_k - begin_k, 0, h, 0] for h in range(x.q.shape[1])]
    lines[0][0] = len(lines) - 1
    return torch.tensor(lines).view(-1)


def python(pid: int, seed: int, again: list[int], most: int = 2) -> dict[str, Any]:
    """The names of device code. most: products under way when a consumer passes its turn on."""
    machine, turns = Machine(pid, seed), Turns()
    names = machine.python()
    for name, value in vars(names["gl"]).items():
        names.setdefault(name, value)
    language = SimpleNamespace(**vars(names["gl"]))
    language.maximum, language.minimum = either(torch.maximum, max), either(torch.minimum, min)
    language.where = lambda c, a, b: torch.where(c, a, b) if torch.is_tensor(c) else where(c, a, b)
    language.max, language.sum = (lambda x, axis: x.amax(axis)), (lambda x, axis: x.sum(axis))
    language.full = lambda shape, value, dtype, layout: register(torch.full(shape, value))
    language.DotOperandLayout = language.BlockedLayout = lambda *a: None
    language.convert_layout = lambda x, layout, assert_trivial=False: x
    language.zeros_like = torch.zeros_like
    language.split, language.join = (lambda x: x.unbind(-1)), (lambda a, b: torch.stack((a, b), -1))
    language.log2, language.barrier = torch.log2, lambda: None
    language.program_id, language.num_programs = lambda axis: torch.tensor(pid), lambda axis: PROGRAMS
    language.load = lambda at, mask=True, other=0.0: at.load(mask, other)
    language.atomic_add = lambda at, n, sem: at.add(n)
    language.store = lambda at, value, mask: at.store(value, mask)

    def pass_on(number: int, threads: int) -> None:
        assert len(machine.pending("products")) <= most, "passes its turn on before its scores have come"
        turns.come(number, threads, False)

    names = {k: v for k, v in names.items() if not isinstance(v, FunctionType) or v.__module__ == __name__}
    names |= {
        "gl": language, "LOG2E": 1 / math.log(2), "LN2": math.log(2), "BLOCK": 64, "TURN": 8, "FULL": 3, "NONE": 0,
        "LOW": 0.5, "SAFE": 2.0**20, "HIGH": 2.0**64, "TOLD": 8, "HEADER": 8,
        "as_box": lambda desc, tile: tile, "clear_rows": clear_rows,
        "fence_async_shared": lambda: None, "mbarrier": machine.python()["mbarrier"], "tma": machine.python()["tma"],
        "warpgroup_mma": machine.mma, "warpgroup_mma_wait": machine.mma_wait,
        "named_sync": lambda number, threads: turns.come(number, threads, True),
        "named_arrive": pass_on, "store_rows": store_rows,
        "range": lambda *ends: map(torch.tensor, range(*map(int, ends))),
    }  # fmt: skip
    for module in (hopper, tiles, fast_tiles, fast):
        for name, function in vars(module).items():
            if hasattr(function, "fn") and name not in names:
                names[name] = bound(function, names)
    computed = names["_again"]
    names["_pin"] = lambda sums: None
    names["_again"] = lambda *args: (again.append(1), computed(*args))[1]
    return names


def run(x: Any, o: Any, consumers: int, stages: int, q_stages: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(out, lse, how many tiles of a consumer were computed again)."""
    packed = x.cu_seqlens_q is not None
    tensors = [hopper.boxed(t) for t in x[:3]]
    batch, heads, len_q, dim = tensors[0].shape
    kv_heads, len_k = tensors[1].shape[1:3]
    left, right = o.window_left, 0 if o.causal else o.window_right
    rows, n = consumers * 64, 128
    mask = left >= 0 or right >= 0 or len_k % n != 0 or x.kv_lens is not None or packed
    options = (0, False, True, left >= 0, right >= 0, mask, x.sinks is not None, x.kv_lens is not None, packed, dim)
    square = len_k >= len_q and x.kv_lens is None and consumers == 2 and (len_k - len_q) % n == 0
    square = square and (right == 0 or right > 0 and left >= 0 and right % n == len_k % n == 0)
    square = square and (left < 0 or left >= 2 * n - 1 and left % n in (0, n - 1))
    square = square and (not packed or plan.one_packing(x))
    edges = 2 if square and right > 0 else int(square)
    counted = consumers == 2 and q_stages == 2
    of = tiles.Plan(*options, consumers, 64, n, q_stages, stages, 1, False)
    out, lse = torch.full_like(x.q, math.nan), torch.full((batch * heads * len_q,), math.nan)
    sizes = (heads, kv_heads, batch * heads, 2, len_q, len_k, left, right)
    n_tiles = -(-len_q // rows) * batch * heads
    lens, sinks = (None if t is None else Address(t) for t in (x.kv_lens, x.sinks))
    boxes = tuple(Box(t, rows) for t, rows in zip(tensors, (64, n, n)))
    keys = tuple(Address(t.reshape(-1)) for t in (x.k, x.v)) + sum((t.stride()[:3] for t in tensors[1:]), ())
    again: list[int] = []
    taken, order = torch.zeros(1, dtype=torch.int64), None
    if packed:
        taken = table(x, rows)
        order, n_tiles, taken = Address(taken), int(taken[0]), taken[1:2]
    for pid in range(PROGRAMS):
        names = python(pid, pid, again, 1 if square and left < 0 else 2)
        ring = Machine(pid, pid).barriers
        shared_tiles = (
            shared(x.q.dtype, q_stages * consumers, 64, dim), shared(x.q.dtype, stages, n, dim),
            shared(x.q.dtype, stages, n, dim), None, shared(x.q.dtype, consumers, 64, dim),
        )  # fmt: skip
        numbers = Shared(torch.full((q_stages * 8,), -1), [q_stages * 8, 1], "plain")
        counts = (q_stages * consumers, 1), (q_stages * consumers, 1), *[(stages, 1), (stages, consumers)] * 2
        rings = (*shared_tiles, *(ring(*c) for c in counts), None, None)
        strides = out.stride()[:2] if packed else (0, 0)
        results = (Tensor4(hopper.boxed(out)), Address(out.view(-1)), Address(lse), *reversed(strides))
        given = (sinks, lens, order)
        roles = {
            f"_consumer {c}": (results, given, keys, numbers, rings, sizes, n_tiles, o.scale, c, edges, dim, of)
            for c in range(consumers)
        }
        roles["_producer"] = (*boxes, lens, order, Address(taken), numbers, rings, sizes, n_tiles, edges, counted, of)
        play(names, roles)
    assert taken.item() == (n_tiles if counted else 0)  # each program asks once more than it gets
    return out, lse.view(heads, len_q) if packed else lse.view(batch, heads, len_q), len(again)


def play(names: dict[str, Any], roles: dict[str, tuple[Any, ...]]) -> None:
    failed: list[Exception] = []

    def role(name: str, args: tuple[Any, ...]) -> None:
        try:
            names[name.split()[0]](*args)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=role, args=item) for item in roles.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


CASES = (
    ((300, 400), (2, 2, 1), {}, 0.0),
    ((100, 300), (1, 3, 2), {}, 0.0),
    ((400, 400), (2, 4, 2), {"causal": True}, 0.0),
    ((400, 390), (3, 4, 2), {"causal": True}, 0.0),
    ((300, 428), (2, 2, 1), {"causal": True, "sinks": True}, 100.0),
    ((384, 256), (2, 2, 2), {"causal": True}, 0.0),
    ((200, 500), (2, 2, 1), {"window": (None, 30), "sinks": True}, 0.0),
    ((400, 400), (2, 2, 2), {"causal": True, "window": (127, None)}, 0.0),
    ((300, 500), (2, 4, 2), {"window": (100, 130), "sinks": True}, 0.0),
    ((300, 300), (2, 2, 2), {"window": (127, 63)}, 0.0),
    ((400, 390), (3, 4, 2), {"causal": True, "window": (3, None)}, 0.0),
    ((200, 400), (2, 2, 1), {"window": (60, None)}, 0.0),
    ((300, 500), (2, 2, 2), {"causal": True, "window": (300, None)}, 100.0),
    ((512, 512), (2, 4, 2), {"causal": True, "window": (255, None)}, 0.0),
    ((200, 584), (2, 2, 1), {"causal": True, "window": (383, None), "sinks": True}, 0.0),
    ((512, 512), (2, 2, 2), {"causal": True, "window": (383, None)}, 100.0),
    ((512, 512), (2, 4, 2), {"window": (256, 128)}, 0.0),
    ((384, 640), (2, 2, 2), {"window": (383, 256), "sinks": True}, 0.0),
    ((640, 640), (2, 2, 1), {"causal": True, "window": (256, None)}, 0.0),
    ((512, 512), (2, 4, 2), {"window": (255, 128)}, 100.0),
    ((390, 200), (2, 2, 2), {"causal": True}, 0.0),
    ((150, 400), (2, 2, 2), {"kv_lens": [330, 0]}, 0.0),
    ((300, 400), (3, 2, 1), {"kv_lens": [301, 400], "causal": True}, 100.0),
    ((200, 400), (2, 4, 2), {}, 100.0),
    ((260, 400), (2, 2, 2), {"causal": True, "sinks": True}, 20.0),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_roles(case):
    """Results, with scores that rise by so many powers of two; where it is too many, tiles are computed again."""
    (len_q, len_k), (consumers, stages, q_stages), options, rise = case
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 64).to(torch.bfloat16) for n in (len_q, len_k, len_k))
    k, v = k[:, :1], v[:, :1]
    if rise:  # the first 100 keys, which come last
        q[..., 0], k[..., 0], k[:, :, :100, 0] = 8 * math.log(2), 0, rise
    more = {"kv_lens": torch.tensor(options["kv_lens"]).int()} if "kv_lens" in options else {}
    more |= {"sinks": torch.randn(2)} if "sinks" in options else {}
    x, o, _ = inputs_of(q=q, k=k, v=v, **{**options, **more})
    want, want_lse = reference.forward(x._replace(q=q.double(), k=k.double(), v=v.double()), o)
    if x.kv_lens is not None:  # what lies beyond them may be anything
        for b, n in enumerate(x.kv_lens.tolist()):
            x.k[b, :, n:] = x.v[b, :, n:] = math.nan
    out, lse, again = run(x._replace(k=x.k.contiguous(), v=x.v.contiguous()), o, consumers, stages, q_stages)
    assert ((out.double() - want).norm() / want.norm()).item() < 0.01
    torch.testing.assert_close(lse, want_lse.float(), atol=1e-3, rtol=1e-4)
    assert (again > 0) == (rise > 64 or len_q > len_k or options.get("kv_lens") == [330, 0])


PACKED = (
    ([256, 0, 1, 100, 200], None, (2, 2, 2), {"causal": True}, 0.0),
    ([256, 0, 1, 100, 200], None, (2, 4, 1), {"causal": True, "sinks": True}, 0.0),
    ([60, 390, 256], None, (2, 2, 2), {"causal": True}, 100.0),
    ([256, 0, 1, 100, 200], [256, 0, 1, 100, 200], (2, 2, 2), {"causal": True}, 0.0),
    ([129, 0, 64, 200], [70, 30, 200, 400], (2, 2, 2), {"causal": True}, 0.0),
    ([129, 5, 64, 200], [70, 30, 200, 400], (3, 4, 2), {}, 0.0),
)


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_packed_roles(case):
    """Sequences of which the next may hold NaN; their queries and keys packed alike, or not known to be."""
    lens_q, lens_k, (consumers, stages, q_stages), options, rise = case
    torch.manual_seed(0)
    ends = [torch.tensor([0, *lens]).cumsum(0).int() for lens in (lens_q, lens_k or lens_q)]
    cu_q, cu_k = ends
    q, k, v = (torch.randn(int(cu[-1]), n, 64).to(torch.bfloat16) for cu, n in ((cu_q, 2), (cu_k, 1), (cu_k, 1)))
    if rise:
        q[..., 0], k[..., 0], k[100:200, :, 0] = 8 * math.log(2), 0, rise
    more = {"sinks": torch.randn(2)} if "sinks" in options else {}
    x, o, _ = inputs_of(q, k, v, cu_q, cu_q if lens_k is None else cu_k, **{**options, **more})
    want, want_lse = reference.forward(x._replace(q=q.double(), k=k.double(), v=v.double()), o)
    q[cu_q[-2] :] = k[cu_k[-2] :] = v[cu_k[-2] :] = math.nan
    out, lse, again = run(x, o, consumers, stages, q_stages)
    some = int(cu_q[-2])
    out, want, lse, want_lse = out[:some], want[:some], lse[:, :some], want_lse[:, :some]
    assert ((out.double() - want).norm() / want.norm()).item() < 0.01
    torch.testing.assert_close(lse, want_lse.float(), atol=1e-3, rtol=1e-4)
    assert again > 0  # the last sequence, at least


def test_where_it_serves():
    """bfloat16 at length, head_dims that fill up 64 or 128, nothing between q k^T and the softmax but masks."""

    def serves(dim=64, length=4096, dtype=torch.bfloat16, **options):
        with pretend(H100):
            q, k, v = (torch.empty(2, 2, length, dim, dtype=dtype, device="meta") for _ in range(3))
            x, o, _ = inputs_of(q=q, k=k, v=v, **options)
            call = Call(x, o)
        return plan.without_maxima(call, (call.meta["BLOCK_D"], call.meta["BLOCK_DV"])) is not None

    assert serves() and serves(128, causal=True) and serves(80) and serves(window=(7, None))
    assert not serves(256) and not serves(length=255) and serves(length=256)
    assert not serves(dtype=torch.float16) and not serves(softcap=2.0)
    assert not serves(scale=-1.0) and serves(128, window=(7, None))
    assert not serves(bias=torch.empty(1, 1, 1, 4096, device="meta"))
    assert not serves(length=2048) and serves(length=1024) and serves(128, length=1024, causal=True)
    assert serves(128, length=512) and not serves(128, length=511)
    assert serves(length=512, causal=True) and serves(128, length=512, causal=True)
    assert not serves(128, length=511, causal=True)
    assert not serves(length=1023, window=(None, 7)) and not serves(length=256, causal=True)


def test_what_is_known_of_packed_sequences():
    """Whether queries and keys are the same tokens: if so, shorter ones are served, and all tiles are cut alike."""
    with pretend(H100):
        q, k, v = (torch.empty(3000, 2, 64, dtype=torch.bfloat16) for _ in range(3))
        cu = torch.arange(0, 3001, 200).int()
        for ends, causal, alike in (
            ((cu, cu), True, True),
            ((cu, cu[:]), True, True),
            ((cu, cu), False, False),
            ((cu, cu.clone()), True, False),
        ):
            call = Call(*inputs_of(q, k, v, *ends, causal=causal)[:2])
            assert plan.square(call) == alike == (plan.without_maxima(call, (64, 64)) is not None)
        for n, alike, served in ((23, True, True), (24, True, False), (11, False, True), (12, False, False)):
            ends = torch.full((n + 1,), 3000).int()  # of 130, 125, 272 and 250 tokens on average
            ends[0] = 0
            call = Call(*inputs_of(q, k, v, ends, ends if alike else ends.clone(), causal=True)[:2])
            assert (plan.without_maxima(call, (64, 64)) is not None) == served


def test_three_consumers_serve_long_causal_calls():
    """Of head_dim 64, and sooner where rows are no whole sectors."""
    for dim, length, consumers in ((64, 8192, 2), (64, 16384, 3), (48, 8192, 2), (40, 2048, 2), (40, 4096, 3)):
        with pretend(H100):
            q, k, v = (torch.empty(2, 32, length, dim, dtype=torch.bfloat16, device="meta") for _ in range(3))
            call = Call(*inputs_of(q=q, k=k, v=v, causal=True)[:2])
        assert plan.without_maxima(call, (64, 64)).consumers == consumers
