"""Shapes, inputs, flops and bytes of the norms: read by the tests, verify, bench and compile.

SMALL: tiny cases that together touch every option; seconds on a CPU, Triton's interpreter included. GPU, and QUICK
among them: every tile, odd lengths, rows beyond all tiles, over 2**31 elements. COMPILE: cases that together reach
every kernel configuration. BENCH: groups of cases to time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from adatom.ops.norm.api import layer_norm, rms_norm
from adatom.verify import generator

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
Dtype = torch.dtype | None


class Case(NamedTuple):
    """One call, without its tensors: x (*lead, length); layer_norm if centred, which alone has a bias.

    weight, bias, residual: their dtypes, None where absent. layout: "" for contiguous tensors; "cut" for x, residual
        and dy cut out of wider ones, "swapped" for leading dimensions in another order in memory, "last" for a last
        dimension that is not contiguous. offset: the mean of x. quiet: the new residual is not differentiated.
    keep: the forward keeps its statistics for a backward.
    """

    name: str
    lead: tuple[int, ...]
    length: int
    dtype: torch.dtype
    centred: bool = False
    weight: Dtype = None
    bias: Dtype = None
    residual: Dtype = None
    layout: str = ""
    offset: float = 0.0
    quiet: bool = False
    keep: bool = True

    @property
    def op(self) -> str:
        return "norm"

    @property
    def rows(self) -> int:
        return torch.Size(self.lead).numel()

    @property
    def huge(self) -> bool:
        """Whether one of its tensors has more than 2**31 elements."""
        return self.rows * self.length > 2**31


def normal(case: Case, random: torch.Generator | None, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the shape and layout of the case's x, drawn on the generator's device, or unwritten without one."""
    lead, n = case.lead, case.length
    shape = {
        "cut": (*lead, n + 16),
        "swapped": (*lead[1:], lead[0], n) if len(lead) > 1 else (*lead, n),
        "last": (n, *lead),
    }.get(case.layout, (*lead, n))
    if random is None:
        x = torch.empty(shape, device=device, dtype=dtype)
    else:
        draw = torch.bfloat16 if case.huge else torch.float32
        x = torch.randn(shape, generator=random, device=random.device, dtype=draw).to(device, dtype)
    if case.layout == "cut":
        return x[..., 16:]
    if case.layout == "swapped" and len(lead) > 1:
        return x.movedim(-2, 0)
    return x.movedim(0, -1) if case.layout == "last" else x


def make(case: Case, device: torch.device | str, seed: int | None = 0) -> dict[str, Any]:
    """The keyword arguments of `call(case)`: tensors on `device` without requires_grad, unwritten where seed is None.

    The same on every device for a given seed, but for cases of over 2**31 elements, which are drawn on the device.
    """
    device = torch.device(device)
    where = device if case.huge else torch.device("cpu")
    random = None
    if seed is not None:
        random = generator(case.name, seed, where)
    given = {"x": normal(case, random, device, case.dtype)}
    if case.offset and seed is not None:
        given["x"] = given["x"] + case.offset
    for name in ("weight", "bias"):
        dtype = getattr(case, name)
        if dtype is not None:
            drawn = torch.randn(case.length, generator=random, device=where)  # few, so even where unwritten would do
            given[name] = (drawn + (name == "weight")).to(device, dtype)
    if case.residual is not None:
        given["residual"] = normal(case, random, device, case.residual)
    return given


def call(case: Case) -> Callable[..., Any]:
    """The public function that the case calls."""
    return layer_norm if case.centred else rms_norm


def flops(case: Case, op: str) -> float:
    """Floating-point operations of a pass, roughly: it is bytes that count."""
    return (6 if op.endswith("_fwd") else 12) * case.rows * case.length


def bytes_moved(case: Case, op: str) -> float:
    """Bytes of a pass if it reads each argument and writes each result once; vectors and statistics are not counted."""
    x = case.dtype.itemsize
    h = x if case.residual is None else torch.promote_types(case.dtype, case.residual).itemsize
    residual = 0 if case.residual is None else case.residual.itemsize + h
    dh = 0 if case.residual is None or case.quiet else h
    return case.rows * case.length * (2 * x + residual if op.endswith("_fwd") else x + 2 * h + dh)


def _rms(name: str, lead: int | tuple[int, ...], length: int, dtype: torch.dtype, **options: Any) -> Case:
    options = {"weight": dtype} | options
    return Case(name, (lead,) if isinstance(lead, int) else lead, length, dtype, **options)


def _layer(name: str, lead: int | tuple[int, ...], length: int, dtype: torch.dtype, **options: Any) -> Case:
    return _rms(name, lead, length, dtype, **{"centred": True, "bias": dtype, **options})


SMALL: tuple[Case, ...] = (
    _rms("f64 rms", (2, 3), 7, F64),
    _layer("f64 layer residual", 5, 12, F64, residual=F64),
    _rms("f32 rms", 33, 40, F32),
    _layer("f32 layer", 33, 40, F32),
    _rms("bf16 rms", (4, 5), 128, BF16),
    _layer("bf16 layer", (4, 5), 96, BF16),
    _rms("f16 rms plain", 9, 300, F16, weight=None),
    _layer("f16 layer plain", 9, 300, F16, weight=None, bias=None),
    _layer("bf16 layer bias alone", 9, 64, BF16, weight=None),
    _layer("bf16 layer weight alone", 9, 64, BF16, bias=None),
    _rms("bf16 rms float weight", 20, 72, BF16, weight=F32),
    _layer("bf16 layer float weight", 20, 72, BF16, weight=F32, bias=F32),
    _rms("bf16 rms residual", 21, 80, BF16, residual=BF16),
    _rms("bf16 rms float residual", 21, 80, BF16, residual=F32),
    _layer("f16 layer quiet residual", 21, 80, F16, residual=F16, quiet=True),
    _rms("bf16 rms cut", (3, 7), 48, BF16, layout="cut", residual=BF16),
    _rms("f16 rms swapped", (3, 2, 5), 32, F16, layout="swapped", residual=F16),
    _layer("f32 layer last", (3, 7), 24, F32, layout="last"),
    _layer("f32 layer offset", 12, 200, F32, offset=100.0),
    _rms("bf16 rms one row", 1, 50, BF16),
    _rms("f32 rms one column", 40, 1, F32),
    _rms("bf16 rms no rows", (0, 3), 16, BF16),
    _rms("bf16 rms alone", 21, 80, BF16, residual=BF16, keep=False),
    _layer("f32 layer alone", 21, 40, F32, keep=False),
)
_LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 12288, 16384, 32768)
_EVEN = tuple(
    make_one(f"{name} {kind} {n}", 517, n, dtype, residual=dtype if n % 3 == 1 else None)
    for n in _LENGTHS
    for name, dtype in (("bf16", BF16), ("f32", F32))
    for kind, make_one in (("rms", _rms), ("layer", _layer))
)
GPU: tuple[Case, ...] = (
    *SMALL,
    *_EVEN,
    *(_rms(f"bf16 rms odd {n}", 301, n, BF16, residual=BF16) for n in (77, 999, 2880, 5120, 12289, 24000)),
    *(_layer(f"f16 layer odd {n}", 301, n, F16) for n in (77, 999, 2880, 5120, 12289, 24000)),
    *(
        _layer(f"bf16 layer residual {n}", 301, n, BF16, residual=BF16)
        for n in (3072, 6144, 12288, 18432, 24576, 32768)
    ),
    _rms("bf16 rms 65536", 67, 65536, BF16),
    _layer("bf16 layer 131072", 67, 131072, BF16, residual=BF16),
    _layer("f32 layer 100003", 35, 100003, F32),
    *(_rms(f"bf16 rms residual {n}", 301, n, BF16, residual=BF16) for n in (12288, 32768)),
    *(_rms(f"bf16 rms float residual {n}", 301, n, BF16, residual=F32) for n in (12288, 32768)),
    _rms("f32 rms 65536 float residual", 35, 65536, BF16, residual=F32),
    _rms("bf16 rms many", 40000, 128, BF16),
    _rms("bf16 rms training", 8192, 4096, BF16, residual=BF16),
    _rms("bf16 rms float weight large", 4096, 4096, BF16, weight=F32, residual=F32),
    _rms("bf16 rms plain large", 1000, 8192, BF16, weight=None),
    _layer("bf16 layer weight alone large", 1000, 4096, BF16, bias=None),
    _layer("bf16 layer bias alone large", 1000, 32768, BF16, weight=None),
    _rms("bf16 rms heads cut", (64, 50, 8), 128, BF16, layout="cut"),
    _rms("bf16 rms heads swapped", (8, 16, 100), 128, BF16, layout="swapped"),
    _rms("bf16 rms cut long", (5, 31), 16384, BF16, layout="cut", residual=BF16),
    _layer("f32 layer last large", (30, 70), 384, F32, layout="last"),
    _layer("f32 layer offset large", 500, 4096, F32, offset=1000.0),
    _layer("f32 layer offset long", 50, 70000, F32, offset=1000.0),
    *(_rms(f"bf16 rms alone {n}", 517, n, BF16, keep=False) for n in (1024, 4096, 7168, 8192, 16384)),
    _rms("bf16 rms 7168", 301, 7168, BF16),
    _rms("f16 rms 5000", 301, 5000, F16),
    *(_layer(f"bf16 layer alone {n}", 517, n, BF16, keep=False) for n in (1024, 8192, 100003)),
    _rms("bf16 rms huge", 2**20 + 7, 2064, BF16),
)
_QUICK = ("1024", "8192", "32768", "131072", "training", "swapped")
QUICK: tuple[Case, ...] = (*SMALL[::3], *(c for c in GPU if not c.huge and c.name.endswith(_QUICK) and c.rows > 60))
COMPILE: tuple[Case, ...] = (
    *(_rms(f"bf16 rms {n}", 4096, n, BF16) for n in (*_LENGTHS, 7168)),
    *(_rms(f"bf16 rms residual {n}", 4096, n, BF16, residual=BF16) for n in _LENGTHS),
    *(_layer(f"bf16 layer {n}", 4096, n, BF16) for n in _LENGTHS),
    *(_layer(f"bf16 layer residual {n}", 4096, n, BF16, residual=BF16) for n in (12288, 16384, 32768)),
    *(_rms(f"f32 rms {n}", 1024, n, F32) for n in _LENGTHS),
    *(_layer(f"f32 layer residual {n}", 1024, n, F32, residual=F32) for n in _LENGTHS),
    *(_rms(f"bf16 rms odd {n}", 301, n, BF16, residual=F32) for n in (77, 999, 5120, 24000)),
    *(_layer(f"f16 layer odd {n}", 301, n, F16, weight=F32, bias=F32) for n in (77, 999, 5120, 24000)),
    _rms("bf16 rms 65536", 64, 65536, BF16),
    _layer("f32 layer residual 100003", 64, 100003, F32, residual=F32),
    _rms("bf16 rms swapped", (8, 16, 100), 128, BF16, layout="swapped"),
    *(_layer(f"bf16 layer alone {n}", 4096, n, BF16, keep=False) for n in (1024, 8192, 32768)),
)
COMPILE_QUICK = ("bf16 rms 4096", "bf16 layer 1024", "bf16 rms residual 32768", "f32 layer residual 100003")

_SHAPES = ((32768, 1024), (32768, 4096), (8192, 8192), (4096, 32768))
BENCH: dict[str, tuple[Case, ...]] = {
    "rms": tuple(_rms(f"rms {r}x{n}", r, n, BF16) for r, n in _SHAPES),
    "layer": tuple(_layer(f"layer {r}x{n}", r, n, BF16) for r, n in _SHAPES),
    "rms residual": tuple(_rms(f"rms residual {r}x{n}", r, n, BF16, residual=BF16) for r, n in _SHAPES),
}
BENCH_CPU: dict[str, tuple[Case, ...]] = {"rms": (_rms("rms 512x512", 512, 512, F32),)}
