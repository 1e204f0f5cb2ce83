"""Shapes, inputs, flops and bytes of linear and gated: read by the tests, verify, bench and compile.

SMALL: tiny cases that together touch every option; seconds on a CPU, Triton's interpreter included. GPU, and QUICK
among them: many tiles, every activation, odd sizes, over 2**31 elements. COMPILE: cases that together reach every
kernel configuration. BENCH, BENCH_CPU: groups of cases to time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from adatom.ops.linear.api import linear
from adatom.ops.linear.problem import ACTIVATIONS
from adatom.verify import generator

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


class Case(NamedTuple):
    """One call, without its tensors: x (*lead, in), `out` features.

    layout: "" for contiguous tensors; "x" and "w" for an x and weights cut out of wider ones, "t" for weights stored
        transposed. apart: the gate's and the other weight are two tensors (gated only). magnitude: standard deviation
        of what the activation is given.
    """

    name: str
    lead: tuple[int, ...]
    in_features: int
    out_features: int
    dtype: torch.dtype
    activation: str | None = None
    bias: bool = True
    recompute: bool = False
    precision: str | None = None
    layout: str = ""
    apart: bool = False
    gated: bool = False
    magnitude: float = 1.0

    @property
    def op(self) -> str:
        return "gated" if self.gated else "linear"

    @property
    def rows(self) -> int:
        return torch.Size(self.lead).numel()

    @property
    def huge(self) -> bool:
        """Whether one of its tensors has more than 2**31 elements."""
        wide = max(self.in_features, self.out_features * (2 if self.gated else 1))
        return max(self.rows * wide, self.in_features * self.out_features) > 2**31


def make(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """The keyword arguments of `call(case)`: tensors on `device` without requires_grad, and the options.

    The same on every device for a given seed, but for cases of over 2**31 elements, which are drawn on the device.
    """
    device = torch.device(device)
    where = device if case.huge else torch.device("cpu")
    random = generator(case.name, seed, where)
    draw = torch.bfloat16 if case.huge else torch.float32

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=random, device=where, dtype=draw) * scale).to(device, case.dtype)

    def weight(rows: int) -> torch.Tensor:
        scale, more = case.magnitude / max(case.in_features, 1) ** 0.5, 8 if "w" in case.layout else 0
        if "t" in case.layout:
            return normal(case.in_features, rows, scale=scale).t()
        return normal(rows, case.in_features + more, scale=scale)[:, more:]

    more = 8 if "x" in case.layout else 0
    given: dict[str, Any] = {"x": normal(*case.lead, case.in_features + more)[..., more:]}
    if not case.gated:
        given["weight"] = weight(case.out_features)
        if case.bias:
            given["bias"] = normal(case.out_features)
        given["activation"] = case.activation
    else:
        given["w_gate"] = weight(case.out_features * (1 if case.apart else 2))
        if case.apart:
            given["w_up"] = weight(case.out_features)
        if case.activation != "silu":
            given["approximate"] = "tanh" if case.activation == "gelu_tanh" else "none"
    for name in ("recompute", "precision"):
        if getattr(case, name):
            given[name] = getattr(case, name)
    return given


def call(case: Case) -> Callable[..., Any]:
    """The public function that the case calls."""
    return linear


def flops(case: Case, op: str) -> float:
    """Floating-point operations of a pass: one product forward, two backward, three where it recomputes."""
    products = 1 if op.endswith("_fwd") else 3 if case.recompute else 2
    return products * 2 * case.rows * case.in_features * case.out_features * (2 if case.gated else 1)


def bytes_moved(case: Case, op: str) -> float:
    """Bytes of a pass if it reads each argument and writes each result once."""
    wide = case.out_features * (2 if case.gated else 1)
    x, weight, out, z = (
        case.rows * case.in_features,
        case.in_features * wide,
        case.rows * case.out_features,
        case.rows * wide,
    )
    kept = 0 if case.recompute or not case.gated and case.activation is None else z
    return case.dtype.itemsize * (x + weight + out + kept if op.endswith("_fwd") else 2 * (x + weight) + out + kept)


def _case(name: str, lead: int | tuple[int, ...], k: int, n: int, dtype: torch.dtype, *a: Any, **options: Any) -> Case:
    return Case(name, (lead,) if isinstance(lead, int) else lead, k, n, dtype, *a, **options)


SMALL: tuple[Case, ...] = (
    _case("f64 plain", (2, 3), 5, 7, F64, bias=False),
    _case("f64 gelu", (4, 5), 6, 9, F64, "gelu"),
    *(_case(f"f32 {a}", 33, 24, 40, F32, a) for a in ACTIVATIONS[1:]),
    *(_case(f"bf16 {a}", 20, 48, 72, BF16, a) for a in ACTIVATIONS[1:]),
    _case("f16 plain", 17, 19, 21, F16),
    _case("f32 tf32", 40, 56, 24, F32, "gelu", precision="tf32"),
    _case("f32 ieee", 40, 56, 24, F32, "silu", precision="ieee"),
    _case("bf16 recompute gelu", 50, 33, 37, BF16, "gelu", recompute=True),
    _case("bf16 recompute relu", 50, 33, 37, BF16, "relu", recompute=True),
    _case("f32 recompute silu no bias", 35, 40, 24, F32, "silu", bias=False, recompute=True),
    _case("f16 strides", (3, 7), 24, 40, F16, "gelu_tanh", layout="xw"),
    _case("bf16 transposed weight", 21, 24, 40, BF16, "relu", layout="t"),
    _case("f16 large values", 40, 64, 48, F16, "gelu", magnitude=30.0),
    _case("bf16 one row", (), 32, 16, BF16, "silu"),
    _case("f32 one column", 40, 1, 1, F32, "gelu"),
    _case("bf16 nothing to sum", 4, 0, 8, BF16, "gelu"),
    _case("bf16 no rows", (0, 3), 16, 8, BF16, "gelu"),
)
GPU: tuple[Case, ...] = (
    *SMALL,
    *(_case(f"bf16 {a} 1000x520x1032", 1000, 520, 1032, BF16, a) for a in (None, *ACTIVATIONS[1:])),
    *(_case(f"bf16 made {a}", 4000, 2040, 2120, BF16, a) for a in ACTIVATIONS[1:]),
    *(_case(f"f16 made {a}", 4000, 2040, 2120, F16, a) for a in ACTIVATIONS[2:]),
    *(_case(f"f16 {a} 520x1024x776", 520, 1024, 776, F16, a) for a in (None, *ACTIVATIONS[1:])),
    *(_case(f"bf16 recompute {a}", (3, 250), 456, 712, BF16, a, recompute=True) for a in ACTIVATIONS[1:]),
    _case("f16 recompute no bias", 700, 456, 712, F16, "gelu", bias=False, recompute=True),
    _case("bf16 odd", 301, 203, 407, BF16, "gelu"),
    _case("bf16 odd recompute", 301, 203, 407, BF16, "silu", recompute=True),
    _case("bf16 plain no bias large", 4096, 1024, 4096, BF16, bias=False),
    _case("bf16 gelu large", 4096, 1024, 4096, BF16, "gelu"),
    _case("bf16 gelu deep", 512, 8192, 2048, BF16, "gelu"),
    _case("bf16 thin", 33, 4096, 4096, BF16, "silu"),
    _case("bf16 8 features", 4096, 256, 8, BF16, "relu"),
    _case("bf16 strides large", (4, 300), 512, 768, BF16, "silu", layout="xw"),
    _case("bf16 transposed large", 1200, 512, 768, BF16, "silu", layout="t"),
    _case("f16 large values large", 2000, 512, 768, F16, "gelu_tanh", magnitude=30.0),
    *(_case(f"f32 {p}", 700, 456, 712, F32, "gelu", precision=p) for p in ("tf32x3", "tf32", "ieee")),
    _case("f32 plain", 1000, 520, 1032, F32),
    _case("f32 recompute", 700, 456, 712, F32, "silu", recompute=True),
    _case("bf16 huge", 262144 + 7, 64, 8208, BF16, "gelu"),
)
QUICK: tuple[Case, ...] = tuple(c for c in GPU if not c.huge)[::3]
COMPILE: tuple[Case, ...] = (
    *(_case(f"bf16 {a}", 8192, 1024, 4096, BF16, a) for a in (None, *ACTIVATIONS[1:])),
    *(_case(f"bf16 made {a}", 8192, 2048, 4096, BF16, a) for a in ACTIVATIONS[1:]),
    *(_case(f"bf16 recompute {a}", 8192, 1024, 4096, BF16, a, recompute=True) for a in ACTIVATIONS[1:]),
    _case("f16 gelu", 8192, 1024, 4096, F16, "gelu"),
    _case("bf16 small gelu", 512, 1024, 1024, BF16, "gelu"),
    *(_case(f"f32 {p}", 4096, 1024, 4096, F32, "gelu", precision=p) for p in ("tf32x3", "tf32", "ieee")),
    _case("f32 recompute", 4096, 1024, 4096, F32, "gelu", recompute=True),
    _case("bf16 odd", 301, 203, 407, BF16, "gelu"),
)
COMPILE_QUICK = ("bf16 gelu", "bf16 made gelu", "bf16 recompute gelu", "f32 tf32x3")


def _bench(activation: str | None, bias: bool) -> tuple[Case, ...]:
    shapes = ((8192, 8192, 8192), (8192, 4096, 16384), (4096, 1024, 4096), (16384, 2048, 8192))
    return tuple(_case(f"{activation or 'plain'} {m}x{k}x{n}", m, k, n, BF16, activation, bias) for m, k, n in shapes)


BENCH: dict[str, tuple[Case, ...]] = {
    "linear": _bench(None, False),
    **{f"linear_{name}": _bench(name, True) for name in ACTIVATIONS[1:]},
}
BENCH_CPU: dict[str, tuple[Case, ...]] = {"linear_gelu": (_case("gelu 512x256x1024", 512, 256, 1024, F32, "gelu"),)}
