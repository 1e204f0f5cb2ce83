"""The Hopper backward beyond head_dim 128, run as Python: its three roles as threads that meet at barriers.

Device code becomes Python by giving its functions other globals. What is asynchronous on the GPU happens as late as it
may: a product reads shared memory when its warpgroup waits for it, a store when its thread waits for it, and a tile
that TMA loads holds NaN until its barrier completes. A wait too few thus gives NaN, or numbers that differ.
"""

from __future__ import annotations

import math
import random
import threading
from collections import defaultdict
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


class Register(torch.Tensor):
    """What a warpgroup holds."""

    type = SimpleNamespace(layout=None)


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
            "as_box": lambda desc, tile: tile, "fence_async_shared": lambda: None,
            "named_sync": lambda number, threads: self.both.wait(10),
            "visible": visible, "clear_rows": clear_rows,
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
                    names[name] = FunctionType(function.fn.__code__, names, name, function.fn.__defaults__)
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


def load(at: Any, mask: Any = None, other: float = 0) -> torch.Tensor:
    if torch.is_tensor(at):
        return at
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


def run(x, o, dout, delta, lse, stages: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dQ, dK, dV) of the kernels, their programs one after the other."""
    batch, heads, len_q, dim = x.q.shape
    kv_heads, len_k, dim_v = x.v.shape[1:]
    hq, hv = (64 if dim <= 192 else 128), next(h for h in (0, 64, 128) if dim_v <= 128 + h)
    left, right = o.window_left, (0 if o.causal else o.window_right)
    lens = None if x.kv_lens is None else Lens(x.kv_lens.tolist())
    even = len_k % 64 == 0 and lens is None
    plan = walk.Plan(hq, hv, left >= 0, right >= 0, even, lens is not None)
    n_m, half = math.ceil(len_q / 64), x.q.dtype
    rows = torch.full((batch * heads, n_m * 64), math.inf)
    rows[:, :len_q] = torch.where(lse == -math.inf, math.inf, lse / math.log(2)).flatten(0, 1)
    deltas = torch.zeros(batch * heads, n_m * 64)
    deltas[:, :len_q] = delta.flatten(0, 1)
    dq, dk, dv = (torch.full_like(t, math.nan) for t in x[:3])
    q, k, v, do, d_q, d_k, d_v = map(Tensor4, (x.q, x.k, x.v, dout, dq, dk, dv))
    numbers = Tensor4(rows.view(-1)), Tensor4(deltas.view(-1))
    options = (len_q, len_k, left, right)
    for pid in range(math.ceil(len_k / 64) * batch * kv_heads):
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
        counts = (heads, kv_heads, batch * kv_heads, 2, *options)
        play(
            machine,
            {
                "producer": (q, k, v, do, *numbers, lens, tiles, bars, counts, plan),
                "value_consumer": (d_v, lens, tiles, bars, counts, o.scale, plan),
                "key_consumer": (d_k, lens, tiles, bars, counts, o.scale, plan),
            },
        )
    for pid in range(math.ceil(len_q / 128) * batch * heads):
        machine = Machine(pid, seed)
        ring = machine.barriers
        tiles = (
            shared(half, 2, 64, 128), shared(half, 2, 64, hq), shared(half, 2, 64, 128), shared(half, 2, 64, hv or 64),
            shared(half, 2, 64, 128), shared(half, 2, 64, hq),
            shared(half, stages, 64, 128), shared(half, stages, 64, hv or 64),
        )  # fmt: skip
        bars = (ring(1, 1), ring(1, 1), ring(2, 1), ring(2, 2), ring(stages, 1), ring(stages, 2))
        counts = (heads, kv_heads, batch * heads, 3, *options)
        masks = (left >= 0, right >= 0)
        pointers = (Pointer(rows.view(-1)), Pointer(deltas.view(-1)), lens)
        play(
            machine,
            {"key_producer": (q, k, v, do, lens, tiles, bars, counts, hq, hv, stages, *masks, lens is not None)}
            | {
                f"query_consumer {c}": (
                    d_q,
                    *pointers,
                    tiles,
                    bars,
                    counts,
                    o.scale,
                    c,
                    hq,
                    hv,
                    stages,
                    *masks,
                    even,
                    lens is not None,
                )  # fmt: skip
                for c in (0, 1)
            },
        )
    return dq, dk, dv


CASES = (
    ((256, 256), (130, 200), 1, {}),
    ((192, 128), (200, 150), 1, {"causal": True}),
    ((136, 192), (150, 140), 3, {"window": (70, 20)}),
    ((256, 200), (70, 190), 1, {"kv_lens": [100, 0], "causal": True}),
    ((192, 72), (64, 64), 2, {}),
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
        ((256, 256), {"softcap": 3.0}, "softcap"),
        ((256, 256), {"dtype": F32}, "float32"),
    ],
    ids=str,
)
def test_what_it_takes(dims, options, word):
    dtype = options.pop("dtype", torch.bfloat16)
    q, k, v = (torch.zeros(1, 2, 70, d, dtype=dtype) for d in (dims[0], *dims))
    with pretend(H100):
        x, o, _ = inputs_of(q=q, k=k, v=v, **options)
        why = limits.hopper_deep_any(problem(x, o))
    assert why is None if word is None else word in why
