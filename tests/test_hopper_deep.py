"""The Hopper backward beyond head_dim 128, run as Python: its three roles as threads that meet at barriers.

Device code becomes Python by giving its functions other globals. What is asynchronous on the GPU happens as late as it
may: a product reads shared memory when its warpgroup waits for it, a store when its thread waits for it, and a tile
that TMA loads holds NaN until its barrier completes. A wait too few thus gives NaN, or numbers that differ.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from adatom.device import Device, pretend  # noqa: E402
from adatom.ops.attention import hopper_bwd_feed as feed  # noqa: E402
from adatom.ops.attention import hopper_deep as deep  # noqa: E402
from adatom.ops.attention import hopper_deep_query as query  # noqa: E402
from adatom.ops.attention import hopper_deep_walk as walk  # noqa: E402
from adatom.ops.attention import limits, reference  # noqa: E402
from adatom.ops.attention.api import inputs_of  # noqa: E402
from adatom.ops.attention.problem import problem  # noqa: E402
from adatom.tiles import hopper  # noqa: E402

H100 = Device("cuda", 90, 132, 232448)
PLAIN, SWIZZLED = "plain", "swizzled"
F32 = torch.float32
END = hopper.END.value


def bound(function: Any, names: dict[str, Any]) -> FunctionType:
    """A function of device code as Python, whose names are these."""
    f = function.fn
    return FunctionType(f.__code__, names, f.__name__, f.__defaults__, f.__closure__)


class Register(torch.Tensor):
    """What a warpgroup holds."""

    type = SimpleNamespace(layout=None)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Any:
        return self.view(dtype) if bitcast else super().to(dtype)


def register(x: torch.Tensor) -> Register:
    return x.as_subclass(Register)


class Shared:
    """A tile in shared memory: swizzled ones lie there by pieces of 64 columns, or of all that it has."""

    def __init__(self, flat: torch.Tensor, shape: list[int], layout: str) -> None:
        assert flat.numel() == math.prod(shape)
        self.flat, self.shape, self.layout, self.dtype, self.turned = flat, list(shape), layout, flat.dtype, False
        self.part = slice(None), slice(None)  # rows and columns

    def index(self, i: int) -> Shared:
        assert 0 <= i < self.shape[0]
        return Shared(self.flat.view(self.shape[0], -1)[i], self.shape[1:], self.layout)

    def reinterpret(self, dtype: torch.dtype, shape: list[int], layout: str) -> Shared:
        return Shared(self.flat.view(dtype), shape, layout)

    def permute(self, order: tuple[int, int]) -> Shared:
        turned = Shared(self.flat, self.shape, self.layout)
        turned.part, turned.turned = self.part, not self.turned
        return turned

    def slice(self, start: int, n: int, dim: int) -> Shared:
        part = Shared(self.flat, self.shape, self.layout)
        some = slice(start, start + n)
        part.part = (some, slice(None)) if dim == 0 else (slice(None), some)
        return part

    def load(self, layout: Any = None) -> Register:
        x = self.flat.view(self.shape)
        if self.layout == SWIZZLED and len(self.shape) == 2:
            x = self.flat.view(-1, self.shape[0], min(64, self.shape[1])).transpose(0, 1).reshape(self.shape)
        x = x[self.part] if len(self.shape) == 2 else x
        return register((x.T if self.turned else x).clone())

    def store(self, x: torch.Tensor) -> None:
        assert list(x.shape) == self.shape and x.dtype == self.dtype
        if self.layout == SWIZZLED:
            x = x.reshape(self.shape[0], -1, min(64, self.shape[1])).transpose(0, 1)
        self.flat.copy_(x.reshape(-1))


class Tensor4:
    """A descriptor: boxes of 64 or `columns` columns of a 4-D tensor, or rows of what has fewer dimensions."""

    layout = SWIZZLED

    def __init__(self, x: torch.Tensor, columns: int = 64) -> None:
        self.x, self.dtype, self.block_type = x, x.dtype, SimpleNamespace(shape=[1, 1, 64, columns])

    def box(self, at: list[int], like: Shared) -> tuple[torch.Tensor, tuple[slice, ...]]:
        """(the part that exists, where it lies in the box)."""
        sizes = [1] * (len(at) - len(like.shape)) + like.shape
        part = self.x[tuple(slice(a, a + n) for a, n in zip(at, sizes))]
        return part, tuple(slice(0, n) for n in part.shape)


class Packed(Tensor4):
    """A descriptor of packed (tokens, heads, dim), as `hopper.box_at` asks it: rows end at END."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__(x)
        self.block_type = SimpleNamespace(shape=[1, 1, 1, 64, 64])

    def box(self, at: tuple[int, ...], like: Shared) -> tuple[torch.Tensor, tuple[slice, ...]]:
        wraps, token, head, row, column = at
        assert wraps == END and 0 <= token and 0 <= row
        first, rows = token + row - END, max(0, min(like.shape[0], END - row))
        assert not rows or 0 <= first <= len(self.x) - rows
        part = self.x[first : first + rows, head, column : column + like.shape[1]][None, None, None]
        return part, tuple(slice(0, n) for n in part.shape)


class Barrier:
    def __init__(self, changed: threading.Condition, count: int) -> None:
        self.changed, self.count, self.left, self.bytes, self.done = changed, count, count, 0, 0

    def add(self, arrivals: int, nbytes: int) -> None:
        with self.changed:
            self.left -= arrivals
            self.bytes += nbytes
            assert self.left >= 0
            if self.left == 0 and self.bytes == 0:
                self.left, self.done = self.count, self.done + 1
            self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.done & 1 != parity, timeout=10):
                raise TimeoutError("waits for ever")


class Ring(list):
    index = list.__getitem__


class Product:
    """A product under way."""

    value: Register | None = None


class Machine:
    """A multiprocessor."""

    def __init__(self, pid: int, seed: int) -> None:
        self.changed, self.random = threading.Condition(), random.Random(seed)
        self.pid = pid
        self.under_way: dict[Any, list[Any]] = defaultdict(list)
        self.both = threading.Barrier(2)
        self.adding = threading.Lock()

    def barriers(self, n: int, count: int) -> Ring:
        return Ring(Barrier(self.changed, count) for _ in range(n))

    def pending(self, kind: str) -> list[Any]:
        """What this thread has under way."""
        return self.under_way[threading.get_ident(), kind]

    # products

    def mma(self, a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
        made = Product()

        def compute() -> None:
            left = a.load() if isinstance(a, Shared) else a
            before = acc.value if isinstance(acc, Product) else acc
            product = left.float() @ b.load().float()
            made.value = register(before + product if use_acc else product)

        self.pending("products").append(compute)
        return made

    def mma_wait(self, n: int, deps: tuple[Any, ...]) -> Any:
        queue = self.pending("products")
        while len(queue) > n:
            queue.pop(0)()
        done = tuple(x.value if isinstance(x, Product) else x for x in deps)
        assert all(x is not None for x in done), "waits for too few products"
        return done[0] if len(done) == 1 else done

    # TMA

    def load(self, desc: Tensor4, at: list[int], full: Barrier, tile: Shared) -> None:
        tile.flat.fill_(math.nan)

        def arrive() -> None:
            part, where = desc.box(at, tile)
            x = torch.zeros([1] * (len(at) - len(tile.shape)) + tile.shape, dtype=desc.dtype)
            x[where] = part
            tile.flat.copy_(x.reshape(-1))
            full.add(0, -tile.flat.numel() * tile.flat.element_size())

        threading.Timer(self.random.random() * 2e-3, arrive).start()

    def later(self, desc: Tensor4, at: list[int], tile: Shared, add: bool) -> None:
        def leave() -> None:
            part, where = desc.box(at, tile)
            x = tile.flat.view([1] * (len(at) - len(tile.shape)) + tile.shape)[where]
            with self.adding:
                part.copy_(part + x if add else x)

        self.pending("stores").append(leave)

    def store_wait(self, n: int) -> None:
        queue = self.pending("stores")
        while len(queue) > n:
            queue.pop(0)()

    # all of it, by the names of device code

    def python(self) -> dict[str, Any]:
        language = SimpleNamespace(
            minimum=min, maximum=max, where=where,
            zeros=lambda shape, dtype, layout: register(torch.zeros(shape)), static_range=range, float32=F32,
            arange=lambda a, b, layout=None: torch.arange(a, b), exp2=torch.exp2, program_id=lambda axis: self.pid,
            load=load, int32=torch.int32, int64=torch.int64, DotOperandLayout=dict,
            NVMMADistributedLayout=lambda *a: None, SliceLayout=lambda *a: None,
            convert_layout=lambda x, layout, assert_trivial: x,
        )  # fmt: skip
        names: dict[str, Any] = {
            "gl": language, "LOG2E": 1 / math.log(2), "BLOCK": 64, "LO": 128, "BOTH": 8, "MATRIX": SWIZZLED,
            "SCORES": None, "QUERIES": None, "STAGES": 2, "BLOCK_N": 128, "ROWS": 128, "K_STAGES": 2, "ROW": None,
            "END": END, "HEADER": 8,
            "as_box": lambda desc, tile: tile, "fence_async_shared": lambda: None,
            "named_sync": lambda number, threads: self.both.wait(10),
            "visible": visible, "clear_rows": clear_rows, "tanh_of_scores": torch.tanh,
            "warpgroup_mma": self.mma, "warpgroup_mma_wait": self.mma_wait,
            "mbarrier": SimpleNamespace(
                expect=lambda bar, nbytes: bar.add(1, nbytes), arrive=lambda bar, count: bar.add(count, 0),
                wait=lambda bar, phase: bar.wait(phase),
            ),
            "tma": SimpleNamespace(
                async_load=self.load, async_store=lambda *a: self.later(*a, add=False),
                async_atomic_add=lambda *a: self.later(*a, add=True), store_wait=self.store_wait,
            ),
        }  # fmt: skip
        for module in (walk, query, feed, hopper):
            for name, function in vars(module).items():
                if hasattr(function, "fn") and name not in names:
                    names[name] = bound(function, names)
        return names


def where(c, a, b):
    return torch.where(c, a, b) if torch.is_tensor(c) else a if c else b


def visible(i, j, offset: int, len_k: int, left: int, right: int, LEFT: bool, RIGHT: bool) -> torch.Tensor:
    """As `hopper.visible`, which adds masks in place, of which one may be smaller here."""
    return (j < len_k) & (not LEFT or j >= i + offset - left) & (not RIGHT or j <= i + offset + right)


def clear_rows(tile: Shared, rows: int) -> None:
    x = tile.load()
    x[max(rows, 0) :] = 0
    tile.store(x)


class Pointer:
    """To numbers; with offsets, what they point at."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __add__(self, i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x, i


class Lens(list):
    """A pointer to lengths."""

    def __add__(self, i: int) -> torch.Tensor:  # type: ignore[override]
        return torch.tensor(self[i])


class Table:
    """A pointer into a table of tiles."""

    def __init__(self, numbers: list[int], at: int = 0) -> None:
        self.numbers, self.at = numbers, at

    def __add__(self, i: int) -> Table:
        return Table(self.numbers, self.at + i)


def load(at: Any, mask: Any = None, other: float = 0) -> torch.Tensor:
    if torch.is_tensor(at):
        return at
    if isinstance(at, Table):
        return at.numbers[at.at]
    x, i = at
    return torch.where(mask, x[i.clamp(max=len(x) - 1)], other)


def shared(dtype: torch.dtype, *shape: int, layout: str = SWIZZLED) -> Shared:
    return Shared(torch.full((math.prod(shape),), math.nan, dtype=dtype), list(shape), layout)


def play(machine: Machine, roles: dict[str, tuple[Any, ...]]) -> None:
    """Run the roles of a program beside each other; those of one name differ after a space."""
    python, failed = machine.python(), []

    def role(name: str, args: tuple[Any, ...]) -> None:
        try:
            python[name.split()[0]](*args)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=role, args=item) for item in roles.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def sequences(x) -> list[tuple[int, int, int, int]]:
    """(first query token, first key token, queries, keys) of each packed sequence."""
    q, k = x.cu_seqlens_q.tolist(), x.cu_seqlens_k.tolist()
    return [(q[b], k[b], q[b + 1] - q[b], k[b + 1] - k[b]) for b in range(len(q) - 1)]


def slots(values: torch.Tensor, x, fill: float) -> torch.Tensor:
    """Numbers of queries, as lse lies, each head's, of packed sequences each sequence's, from a multiple of 64 on."""
    if x.cu_seqlens_q is None:
        padded = torch.full((*values.shape[:2], math.ceil(values.shape[2] / 64) * 64), fill)
        padded[..., : values.shape[2]] = values
        return padded.flatten()
    cu = sequences(x)
    padded = torch.full((values.shape[0], (values.shape[1] // 64 + len(cu)) * 64), fill)
    for b, (q, _, n, _) in enumerate(cu):
        padded[:, (q // 64 + b) * 64 :][:, :n] = values[:, q : q + n]
    return padded.flatten()


def table(x, block: int, keys: bool) -> Table:
    """What `hopper_packed._table_kernel` writes, in another order."""
    heads = (x.k if keys else x.q).shape[1]
    lines = [
        [row, *line, line[0] // 64 + b, h, 0]
        for b, line in enumerate(sequences(x))
        for h in range(heads)
        for row in range(0, line[3 if keys else 2], block)
    ]
    random.Random(0).shuffle(lines)
    return Table(sum(lines, [len(lines), 0, 0, 0, 0, 0, 0, 0]))


def run(x, o, dout, delta, lse, stages: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dQ, dK, dV) of the kernels, their programs one after the other."""
    packed = x.cu_seqlens_q is not None
    if packed:
        len_q, heads, dim = x.q.shape
        len_k, kv_heads, dim_v = x.v.shape
        orders = table(x, 64, True), table(x, 128, False)
        batch, programs = len(sequences(x)), [order.numbers[0] + 1 for order in orders]  # the last ones have no tile
        n_heads = batch, batch
    else:
        batch, heads, len_q, dim = x.q.shape
        kv_heads, len_k, dim_v = x.v.shape[1:]
        n_heads, orders = (batch * kv_heads, batch * heads), (None, None)
        programs = [math.ceil(len_k / 64) * n_heads[0], math.ceil(len_q / 128) * n_heads[1]]
    hq, hv = (64 if dim <= 192 else 128), next(h for h in (0, 64, 128) if dim_v <= 128 + h)
    left, right = o.window_left, (0 if o.causal else o.window_right)
    lens = None if x.kv_lens is None else Lens(x.kv_lens.tolist())
    even = len_k % 64 == 0 and lens is None and not packed
    plan, half = walk.Plan(hq, hv, left >= 0, right >= 0, even, lens is not None, packed, o.softcap > 0), x.q.dtype
    rows, deltas = slots(torch.where(lse == -math.inf, math.inf, lse / math.log(2)), x, math.inf), slots(delta, x, 0.0)
    dq, dk, dv = (torch.full_like(t, math.nan) for t in x[:3])
    q, k, v, do, d_q, d_k, d_v = map(Packed if packed else Tensor4, (x.q, x.k, x.v, dout, dq, dk, dv))
    numbers = Tensor4(rows), Tensor4(deltas)
    options = (len_q, len_k, left, right)
    for pid in range(programs[0]):
        machine = Machine(pid, seed)
        ring = machine.barriers
        tiles = (
            shared(half, 1, 64, 128), shared(half, 1, 64, hq), shared(half, 1, 64, 128), shared(half, 1, 64, hv or 64),
            shared(half, 2, 64, 128), shared(half, 2, 64, hq), shared(half, 2, 64, 128),
            shared(half, 2, 64, hv or 64), shared(F32, 2, 64, layout=PLAIN), shared(F32, 2, 64, layout=PLAIN),
            shared(half, 64, 64),
        )  # fmt: skip
        bars = (
            ring(1, 1), ring(1, 1), ring(2, 1), ring(2, 2), ring(2, 1), ring(2, 2), ring(2, 1), ring(2, 2),
            ring(1, 1), ring(1, 1),
        )  # fmt: skip
        given = (orders[0], lens, tiles, bars, (heads, kv_heads, n_heads[0], 2, *options))
        play(
            machine,
            {
                "producer": (q, k, v, do, *numbers, *given, plan),
                "value_consumer": (d_v, *given, (o.scale, o.softcap), plan),
                "key_consumer": (d_k, *given, o.scale, plan),
            },
        )
    for pid in range(programs[1]):
        machine = Machine(pid, seed)
        ring = machine.barriers
        tiles = (
            shared(half, 2, 64, 128), shared(half, 2, 64, hq), shared(half, 2, 64, 128), shared(half, 2, 64, hv or 64),
            shared(half, 2, 64, 128), shared(half, 2, 64, hq),
            shared(half, stages, 64, 128), shared(half, stages, 64, hv or 64),
        )  # fmt: skip
        bars = (ring(1, 1), ring(1, 1), ring(2, 1), ring(2, 2), ring(stages, 1), ring(stages, 2))
        given = (orders[1], lens, tiles, bars, (heads, kv_heads, n_heads[1], 3, *options))
        consumers = {
            f"query_consumer {c}": (d_q, Pointer(rows), Pointer(deltas), *given, (o.scale, o.softcap), c, stages, plan)
            for c in (0, 1)
        }
        play(machine, {"key_producer": (q, k, v, do, *given, stages, plan)} | consumers)
    return dq, dk, dv


CASES = (
    ((256, 256), (130, 200), 1, {}),
    ((192, 128), (200, 150), 1, {"causal": True}),
    ((136, 192), (150, 140), 3, {"window": (70, 20)}),
    ((256, 200), (70, 190), 1, {"kv_lens": [100, 0], "causal": True}),
    ((192, 72), (64, 64), 2, {}),
    ((256, 256), (70, 140), 1, {"softcap": 0.5, "causal": True}),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_roles(case):
    (dim, dim_v), (len_q, len_k), sharing, options = case
    torch.manual_seed(0)
    options = {**options, **({"kv_lens": torch.tensor(options["kv_lens"]).int()} if "kv_lens" in options else {})}
    q, dout = (torch.randn(2, 2 * sharing, len_q, d).to(torch.bfloat16) for d in (dim, dim_v))
    k, v = (torch.randn(2, 2, len_k, d).to(torch.bfloat16) for d in (dim, dim_v))
    x, o, _ = inputs_of(q=q, k=k, v=v, **options)
    exact = x._replace(q=q.double(), k=k.double(), v=v.double())
    out, lse = reference.forward(exact, o)
    want = reference.backward(exact, o, out, lse, dout.double(), None, False)[:3]
    if x.kv_lens is not None:  # what lies beyond them may be anything
        for b, n in enumerate(x.kv_lens.tolist()):
            x.k[b, :, n:] = x.v[b, :, n:] = math.nan
    delta = (out * dout.double()).sum(-1)
    for stages in (1, 2):
        for name, got, true in zip(("dq", "dk", "dv"), run(x, o, dout, delta, lse, stages, stages), want):
            error = ((got.double() - true).norm() / true.norm()).item()
            assert error < 0.01, (name, error)


PACKED = (
    ((256, 256), ((70, 70), (0, 0), (130, 130)), 1, {"causal": True}),
    ((192, 128), ((1, 90), (64, 64), (40, 0), (129, 100)), 2, {}),
    ((136, 192), ((0, 70), (128, 128), (100, 65)), 1, {"window": (30, 20)}),
)


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_roles_of_packed_sequences(case):
    """One sequence is NaN, which no other gets to see."""
    (dim, dim_v), lengths, sharing, options = case
    torch.manual_seed(0)
    ends = [torch.tensor([0, *some]).cumsum(0).int() for some in zip(*lengths)]
    (n_q, n_k), heads = (int(end[-1]) for end in ends), 2 * sharing
    q, dout = (torch.randn(n_q, heads, d).to(torch.bfloat16) for d in (dim, dim_v))
    k, v = (torch.randn(n_k, 2, d).to(torch.bfloat16) for d in (dim, dim_v))
    x, o, _ = inputs_of(q=q, k=k, v=v, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], **options)
    exact = x._replace(q=q.double(), k=k.double(), v=v.double())
    out, lse = reference.forward(exact, o)
    want = reference.backward(exact, o, out, lse, dout.double(), None, False)[:3]
    delta = (out * dout.double()).sum(-1).T
    last_q, last_k, *_ = sequences(x)[-1]
    for spoilt in (False, True):
        if spoilt:
            for t, end in ((q, last_q), (dout, last_q), (k, last_k), (v, last_k)):
                t[end:] = math.nan
        parts = (last_q, last_k, last_k) if spoilt else (n_q, n_k, n_k)
        for n, got, true in zip(parts, run(x, o, dout, delta, lse, 1 + spoilt, spoilt), want):
            error = ((got[:n].double() - true[:n]).norm() / true[:n].norm()).item()
            assert error < 0.01, error
            assert not spoilt or got[n:].isnan().all()


BEFORE = """
import torch
from test_hopper_deep import inputs_of, slots
from adatom.device import Device
from adatom.ops.attention import hopper_deep_ends as ends, triton_call
from adatom.tiles import launch

triton_call.facts = lambda device: Device("cpu", 0, 4, 232448)  # the interpreter's
torch.manual_seed(0)
for lengths in (None, (70, 0, 64, 1, 130), (0, 128), (5, 0)):
    cu = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0).int()
    shape = (2, 3, 70, 72) if cu is None else (sum(lengths), 3, 72)
    q, out, dout = (torch.randn(shape) for _ in range(3))
    of = {} if cu is None else {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    x, o, _ = inputs_of(q=q, k=q, v=q, **of)
    shape = shape[:3] if cu is None else (3, shape[0])
    lse, dlse = torch.randn(shape), torch.randn(shape)
    lse[..., ::3] = -float("inf")
    go = ends.before(triton_call.Call(x, o), 64, out, dout, DLSE=True, PLAIN=True)
    go.meta = {key: value for key, value in go.meta.items() if key != "launch_pdl"} | {"EARLY": False}
    rows, delta = torch.full((2, go.programs * 64), float("nan")).unbind()
    plain = torch.full_like(lse, float("nan"))
    go(out, dout, lse, dlse, rows, delta, plain, cu)
    want = (out * dout).sum(-1)
    want = (want if cu is None else want.T) - dlse
    torch.testing.assert_close(plain, want)
    torch.testing.assert_close(delta, slots(want, x, 0.0))
    log2 = torch.where(lse == -float("inf"), float("inf"), lse * 1.4426950408889634)
    torch.testing.assert_close(rows, slots(log2, x, float("inf")))
"""


def test_the_kernel_ahead():
    """Delta and lse of whole batches and of packed sequences, where `slots` has them."""
    root = Path(__file__).parents[1]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join((str(root), str(root / "tests")))}
    done = subprocess.run([sys.executable, "-c", BEFORE], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_fits_in_shared_memory():
    """Tiles of 64 rows of so many columns, and what is of one size."""
    for (dim, dim_v), config in deep.CONFIGS.items():
        columns = 3 * dim + 3 * dim_v  # K, V, two of Q and dO
        assert 64 * columns * 2 + 64 * 64 * 2 + 4 * 64 * 4 + 24 * 8 <= H100.shared_memory, (dim, dim_v)
        columns = 2 * (dim + dim_v) + 2 * dim + config.v_stages * dim_v  # of the kernel of dQ: Q and dO, K, V
        assert 64 * columns * 2 + 24 * 8 <= H100.shared_memory, (dim, dim_v)


@pytest.mark.parametrize(
    "dims, options, word",
    [
        ((256, 256), {}, None),
        ((192, 128), {"causal": True}, None),
        ((128, 128), {}, "head_dim"),
        ((256, 64), {}, "head_dim"),
        ((264, 256), {}, "head_dim"),
        ((256, 256), {"bias": torch.zeros(1, 1, 1, 70, dtype=torch.bfloat16)}, "bias"),
        ((256, 256), {"softcap": 3.0}, None),
        ((256, 256), {"packed": True}, None),
        ((256, 256), {"dtype": F32}, "float32"),
    ],
    ids=str,
)
def test_what_it_takes(dims, options, word):
    dtype = options.pop("dtype", torch.bfloat16)
    q, k, v = (torch.zeros(1, 2, 70, d, dtype=dtype) for d in (dims[0], *dims))
    if options.pop("packed", False):
        q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
        options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, 70], dtype=torch.int32))
    with pretend(H100):
        x, o, _ = inputs_of(q=q, k=k, v=v, **options)
        why = limits.hopper_deep_any(problem(x, o))
    assert why is None if word is None else word in why
