"""Shapes of swiglu and geglu, read by the tests, verify, bench and compile; inputs, flops and bytes are linear's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from adatom.ops.gated.api import geglu, swiglu
from adatom.ops.linear.cases import BF16, F16, F32, F64, Case, bytes_moved, flops, make

__all__ = ["Case", "bytes_moved", "flops", "make"]


def call(case: Case) -> Callable[..., Any]:
    """The public function that the case calls."""
    return swiglu if case.activation == "silu" else geglu


def _case(
    name: str, lead: int | tuple[int, ...], k: int, n: int, dtype: torch.dtype, act: str = "silu", **options: Any
) -> Case:
    shape = (lead,) if isinstance(lead, int) else lead
    return Case(name, shape, k, n, dtype, act, bias=False, gated=True, **options)


SMALL: tuple[Case, ...] = (
    _case("f64 gate", (2, 3), 5, 7, F64),
    _case("f64 gate gelu apart", 9, 6, 5, F64, "gelu", apart=True),
    _case("bf16 gate", 40, 48, 40, BF16),
    _case("bf16 gate apart", 40, 48, 40, BF16, apart=True),
    _case("f16 gate gelu", 33, 24, 17, F16, "gelu"),
    _case("f16 gate gelu_tanh apart", (3, 11), 24, 17, F16, "gelu_tanh", apart=True),
    _case("f32 gate", 35, 40, 24, F32),
    _case("f32 gate apart ieee", 35, 40, 24, F32, apart=True, precision="ieee"),
    _case("f32 gate tf32", 35, 40, 24, F32, "gelu", precision="tf32"),
    _case("bf16 gate recompute", 50, 33, 37, BF16, recompute=True),
    _case("bf16 gate recompute apart gelu", 50, 33, 37, BF16, "gelu", apart=True, recompute=True),
    _case("f16 gate strides", 21, 24, 40, F16, layout="xw", apart=True),
    _case("bf16 gate no rows", (0, 3), 16, 8, BF16),
)
GPU: tuple[Case, ...] = (
    *SMALL,
    *(
        _case(f"{name} gate {act} {how}", 1000, 520, 776, dtype, act, apart=how == "apart")
        for name, dtype in (("bf16", BF16), ("f16", F16))
        for act in ("silu", "gelu", "gelu_tanh")
        for how in ("joined", "apart")
    ),
    *(_case(f"bf16 gate recompute {act}", 750, 456, 712, BF16, act, recompute=True) for act in ("silu", "gelu")),
    _case("f16 gate recompute apart", 750, 456, 712, F16, apart=True, recompute=True),
    _case("bf16 gate large", 4096, 1024, 4096, BF16),
    _case("bf16 gate 8 features", 2000, 256, 8, BF16),
    _case("bf16 gate strides large", 1200, 512, 768, BF16, layout="xw", apart=True),
    _case("f32 gate large", 700, 456, 712, F32),
    _case("f32 gate recompute", 700, 456, 712, F32, recompute=True),
)
QUICK: tuple[Case, ...] = GPU[::3]
COMPILE: tuple[Case, ...] = (
    *(_case(f"bf16 gate {act}", 8192, 1024, 4096, BF16, act) for act in ("silu", "gelu", "gelu_tanh")),
    _case("bf16 gate recompute", 8192, 1024, 4096, BF16, recompute=True),
    _case("bf16 gate small", 512, 1024, 512, BF16),
    *(_case(f"f32 gate {p}", 4096, 1024, 4096, F32, precision=p) for p in ("tf32x3", "tf32", "ieee")),
)
COMPILE_QUICK = ("bf16 gate silu", "bf16 gate recompute", "f32 gate tf32x3")
BENCH: dict[str, tuple[Case, ...]] = {
    "swiglu": tuple(
        _case(f"swiglu {m}x{k}x{n}", m, k, n, BF16)
        for m, k, n in ((8192, 4096, 14336), (16384, 4096, 14336), (4096, 1024, 4096), (16384, 2048, 8192))
    )
}
BENCH_CPU: dict[str, tuple[Case, ...]] = {"swiglu": (_case("swiglu 512x256x1024", 512, 256, 1024, F32),)}
