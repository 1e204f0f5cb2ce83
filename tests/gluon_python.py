"""Gluon kernels as Python: their memory, descriptors and language (their machine is in tests/test_hopper_deep.py)."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from test_hopper_deep import Machine, Shared, Tensor4, bound, play, register

from adatom.ops.attention import hopper_shared_bias as bias_part
from adatom.ops.attention import hopper_shared_lent as borrowed
from adatom.ops.attention import hopper_shared_rows as whole
from adatom.ops.attention import hopper_sharers as common

HALF, F32 = torch.bfloat16, torch.float32


class Tile(Shared):
    """Shared memory as it lies: views of one tensor."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.shape, self.dtype = x, list(x.shape), x.dtype
        self.layout = None

    @property
    def flat(self) -> torch.Tensor:  # type: ignore[override]
        return self.x.reshape(-1)  # of `Halves` a copy, to be read

    def reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        assert (dtype, shape) == (self.dtype, [2 * self.shape[0], self.shape[1], self.shape[2] // 2])
        return Halves(self.x)

    def index(self, i: int) -> Tile:
        assert 0 <= i < len(self.x)
        return Tile(self.x[i])

    def slice(self, start: int, n: int, dim: int = 0) -> Tile:
        return Tile(self.x.narrow(dim, start, n))

    def permute(self, order: tuple[int, int]) -> Tile:
        return Tile(self.x.permute(order))

    def load(self, layout: Any = None) -> Any:
        return register(self.x.clone())

    def store(self, x: torch.Tensor) -> None:
        assert x.dtype == self.dtype
        self.x.copy_(x)


class Halves:
    """Tiles of 128 columns as twice as many of 64: in shared memory one lies after the other."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.width = x, x.shape[2] // 2

    def index(self, i: int) -> Tile:
        return Tile(self.x[i // 2].narrow(1, i % 2 * self.width, self.width))


def shared(dtype: torch.dtype, *shape: int) -> Tile:
    return Tile(torch.full(shape, math.nan if dtype.is_floating_point else -1, dtype=dtype))


class Box(Tensor4):
    """A descriptor: boxes of `rows` of (batch, heads, length, dim), or numbers."""

    def __init__(self, x: torch.Tensor, *shape: int) -> None:
        super().__init__(x)
        self.block_type = SimpleNamespace(shape=[1, 1, *shape], nbytes=math.prod(shape) * x.element_size())

    def box(self, at: list[int], like: Shared) -> tuple[torch.Tensor, tuple[slice, ...]]:
        assert min(at) >= 0  # an illegal instruction
        return super().box(at, like)


class Slow(Box):
    """One whose first line is read late by whoever comes first, when others could long have stored something there."""

    def __init__(self, x: torch.Tensor, rows: int, columns: int, late: list[float]) -> None:
        super().__init__(x, rows, columns)
        self.late = late

    def box(self, at: list[int], like: Shared) -> tuple[torch.Tensor, tuple[slice, ...]]:
        if at[1] == 0 and self.late:
            time.sleep(self.late.pop())
        return super().box(at, like)


class Pointer:
    lock = threading.Lock()

    def __init__(self, x: torch.Tensor, at: Any = 0) -> None:
        self.x, self.at, self.dtype = x, at, SimpleNamespace(element_ty=x.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.x, self.at + more)

    def load(self, mask: Any = None, other: float = 0.0) -> Any:
        if mask is None:
            x = self.x.view(-1)[self.at]
            return register(x) if x.dim() else Whole(x)
        at, mask = torch.broadcast_tensors(*(torch.as_tensor(t).as_subclass(torch.Tensor) for t in (self.at, mask)))
        if not mask.any():  # it may point at nothing
            return register(torch.full(mask.shape, other))
        return register(torch.where(mask, self.x.view(-1)[torch.where(mask, at, 0)], other))

    def store(self, value: Any, mask: torch.Tensor) -> None:
        value = torch.as_tensor(value, dtype=self.x.dtype)
        at, value, mask = torch.broadcast_tensors(torch.as_tensor(self.at), value, mask)
        self.x.view(-1)[at[mask]] = value[mask].as_subclass(torch.Tensor)

    def add(self, n: int) -> Whole:
        with self.lock:
            before = self.load()
            self.x.view(-1)[self.at] += n
            return before


class Whole(int):
    """An integer of device code."""

    def to(self, dtype: Any) -> Whole:
        return self

    def __add__(self, other: Any) -> Any:
        return Whole(int(self) + other) if isinstance(other, int) else int(self) + other

    def __sub__(self, other: int) -> Whole:
        return Whole(int(self) - other)

    def __floordiv__(self, other: int) -> Whole:
        return Whole(int(self) // other)

    def __mod__(self, other: int) -> Whole:
        return Whole(int(self) % other)

    def __mul__(self, other: Any) -> Any:
        return Whole(int(self) * other) if isinstance(other, int) else int(self) * other


def python(machine: Machine, module: ModuleType, programs: int) -> dict[str, Any]:
    """Names of device code with those of a kernel's file."""
    names = Machine.python(machine)
    language = names["gl"]
    language.full = lambda shape, value, dtype, layout: register(torch.full(shape, value))
    language.max, language.sum = (lambda x, dim: x.amax(dim)), (lambda x, dim: x.sum(dim))
    language.min = lambda x, dim: x.amin(dim)
    language.maximum = lambda a, b: torch.maximum(a, b) if torch.is_tensor(b) else max(a, b)
    language.minimum = lambda a, b, propagate_nan=None: a.clamp(max=b) if torch.is_tensor(a) else min(a, b)
    language.log2, language.abs, language.num_programs = torch.log2, torch.abs, lambda axis: programs
    language.float16, language.int16, language.int32 = torch.float16, torch.int16, torch.int32
    language.barrier = lambda: None
    language.inline_asm_elementwise = lambda *a, **k: machine.store_wait(0)
    language.BlockedLayout = lambda *a: None
    language.convert_layout = lambda x, layout, assert_trivial=False: x
    language.DotOperandLayout = lambda *a: None
    language.store = lambda at, value, mask=torch.tensor(True): at.store(value, mask)  # noqa: B008
    language.load = lambda at, mask=None, other=0.0, cache_modifier=None: at.load(mask, other)
    language.atomic_add = lambda at, n, sem: at.add(n)
    names |= {"range": lambda *a: map(Whole, range(*a)), "LN2": math.log(2)}
    names |= dict.fromkeys(("SCORES", "GRAD", "KEEP_NAN", "STORED"))
    for source in (common, borrowed, bias_part, whole, module):
        for name, value in vars(source).items():
            if hasattr(value, "fn") and value.fn.__module__ == source.__name__:
                names[name] = bound(value, names)
            elif name.isupper() and isinstance(getattr(value, "value", None), (int, float)):
                names[name] = value.value
    names["named_sync"] = lambda number, threads: machine.all.wait(10)
    names["number_of"] = lambda number, warps: Whole(number.load())
    names |= getattr(machine, "others", {})
    names["_approximately"] = lambda text, x: 1 / x if "rcp" in text else torch.log2(x)
    names["wait_for_previous"] = names["let_next"] = lambda early: None
    names["widened"] = lambda x, pure=True: x.float()
    names["_wait_read"] = wait_read
    names["place_of"] = lambda chunk, *a, place=names["place_of"]: place(Whole(chunk), *a)
    for name in {"sharer", "tile_of_sum", "_tile"} & set(names):
        names[name] = lambda *a, split=names[name]: tuple(map(Whole, split(*a)))
    return names


def run(module: ModuleType, programs: int, roles: Any, together: bool = False) -> None:
    """All programs of a kernel, one after the other or all at once; roles(machine) gives the roles of one."""

    def one(pid: int) -> None:
        machine = Machine(pid, pid)
        machine.python = lambda machine=machine: python(machine, module, programs)  # type: ignore[method-assign]
        play(machine, roles(machine))

    if not together:
        for pid in range(programs):
            one(pid)
        return
    with ThreadPoolExecutor(programs) as pool:
        for _ in pool.map(one, range(programs)):
            pass


def _held(width: int) -> torch.Tensor:
    """Where number (row, column) of a tile of 64 rows lies: 64 columns after the other, as a warpgroup's threads hold
    them."""
    row, column = torch.arange(64)[:, None], torch.arange(width)[None, :]
    block, column = column // 64, column % 64
    line = row // 16 * 8 + column // 8
    return block * 4096 + line * 128 + row % 8 * 16 + column % 8 // 2 * 4 + row % 16 // 8 * 2 + column % 2


def parts_of(x: torch.Tensor, width: int) -> torch.Tensor:
    """Parts (parts, ..., len_q, len_k) of sums as kernels hand them on: (parts, tiles of 64 rows, 64 * width)."""
    len_q, len_k = x.shape[-2:]
    x = x.flatten(1, -3)
    padded = torch.full((*x.shape[:2], -(-len_q // 128) * 128, width), math.nan)
    padded[..., :len_q, :len_k] = x
    tiles = padded.view(len(x), -1, 64 * width)
    out = torch.empty_like(tiles)
    out[..., _held(width).view(-1)] = tiles
    return out


def sum_of_parts(parts: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """What parts (parts, tiles of 64 rows, ...) add up to, of that shape, in float64."""
    tiles = parts.flatten(2).double().sum(0)
    width = tiles.shape[1] // 64
    rows = tiles[:, _held(width).view(-1)].view(shape[0] * shape[1], -1, width)
    return rows[:, : shape[2], : shape[3]].reshape(shape)


def wait_read(counts: Pointer, stretches: int, tiles: int) -> None:
    for s in range(stretches):
        wait_turn(counts + s, tiles)


def wait_turn(at: Pointer, number: int) -> None:
    end = time.monotonic() + 10
    while at.load() < number:
        assert time.monotonic() < end, "waits for ever"
        time.sleep(1e-4)


def pass_turn(machine: Machine) -> Any:
    def passed(at: Pointer, number: int) -> None:
        machine.store_wait(0)
        at.store(number, torch.tensor(True))

    return passed
