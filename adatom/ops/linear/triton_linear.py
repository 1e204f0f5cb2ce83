# mypy: ignore-errors
"""linear and gated on any GPU from sm_80 (Triton): products with all that comes after them in their epilogues.

Operands have any strides. Rows of tiles are walked in groups, so that tiles of both operands are read again from L2.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from adatom.device import facts
from adatom.ops.linear.problem import Inputs, Options
from adatom.tiles.launch import Launch
from adatom.tiles.triton_dense import gradient, remembered, value_and_slope


class Config(NamedTuple):
    """How a product is tiled: block_m x block_n of the result, block_k of the sum, warps, stages; spill: bytes of
    registers it may spill."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    spill: int = 0


# By kind of arithmetic: tiles for 16-bit operands and for float32 ones, under 99 KB of shared memory.
CONFIGS = {
    "half": Config(128, 128, 32, 8, 3, spill=160),
    "tf32": Config(128, 64, 32, 8, 2),
    "tf32x3": Config(64, 64, 32, 4, 2, spill=64),
    "ieee": Config(64, 64, 16, 8, 2, spill=32),
}
_INTERPRETED = Config(32, 32, 32, 4, 1)


@triton.jit
def _round_tf32(x):
    """float32 with the 10 mantissa bits of TF32, rounded to nearest."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def _product(A, B, i, j, m_i, m_j, K, stride_ai, stride_ak, stride_bj, stride_bk, BLOCK_M: tl.constexpr,
             BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr):
    """Rows i of A times rows j of B, over their K columns: [BLOCK_M, BLOCK_N], float32."""
    k = tl.arange(0, BLOCK_K)
    a_ptr = A + i.to(tl.int64)[:, None] * stride_ai + k.to(tl.int64)[None, :] * stride_ak
    b_ptr = B + j.to(tl.int64)[None, :] * stride_bj + k.to(tl.int64)[:, None] * stride_bk
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in range(0, K, BLOCK_K):
        left = k < K - k0
        a = tl.load(a_ptr, mask=m_i[:, None] & left[None, :], other=0.0)
        b = tl.load(b_ptr, mask=m_j[None, :] & left[:, None], other=0.0)
        if PRECISION == "tf32":  # the tensor core would cut off, not round
            a, b = _round_tf32(a), _round_tf32(b)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_ptr += tl.cast(BLOCK_K, tl.int64) * stride_ak
        b_ptr += tl.cast(BLOCK_K, tl.int64) * stride_bk
    return acc


@triton.jit
def _kernel(A, B, Up, Out, Pre, D, Bias, Sums, M, N, K, stride_ai, stride_ak, stride_bj, stride_bk, stride_uj,
            stride_uk, stride_o, stride_p, stride_d, ACT: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
            KEEP: tl.constexpr, GRAD: tl.constexpr, SUMS: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
            BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    """Out = act(A B^T + bias), (M, N). GATED: Out = act(A B^T) * (A Up^T).

    KEEP: also what act was given, to Pre, and A Up^T beside it. GRAD: instead of Out, the gradient of what act was
    given, from D, that of Out; gated: two beside each other. SUMS: its sums over BLOCK_M rows, (rows / BLOCK_M, N).
    ADD: the result is added to what Out holds.
    """
    pid = tl.program_id(0)
    rows, columns = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = pid // (GROUP * columns) * GROUP
    size = tl.minimum(rows - first, GROUP)
    r = pid - first * columns
    tile = first + r % size
    i = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    j = r // size * BLOCK_N + tl.arange(0, BLOCK_N)
    m_i = i < M
    m_j = j < N
    m = m_i[:, None] & m_j[None, :]
    row = i.to(tl.int64)[:, None]
    z = _product(A, B, i, j, m_i, m_j, K, stride_ai, stride_ak, stride_bj, stride_bk, BLOCK_M, BLOCK_N, BLOCK_K,
                 PRECISION)
    if GATED:
        up = _product(A, Up, i, j, m_i, m_j, K, stride_ai, stride_ak, stride_uj, stride_uk, BLOCK_M, BLOCK_N, BLOCK_K,
                      PRECISION)
    if BIAS:
        z += tl.load(Bias + j, mask=m_j, other=0.0).to(tl.float32)[None, :]
    if KEEP:
        tl.store(Pre + row * stride_p + j[None, :], z.to(Pre.dtype.element_ty), mask=m)
        if GATED:
            tl.store(Pre + row * stride_p + N + j[None, :], up.to(Pre.dtype.element_ty), mask=m)
    value, slope = value_and_slope(z, ACT)
    out = Out + row * stride_o + j[None, :]
    if GRAD:
        value_grad = tl.load(D + row * stride_d + j[None, :], mask=m, other=0.0).to(tl.float32)
        if GATED:
            tl.store(out + N, (value_grad * value).to(Out.dtype.element_ty), mask=m)
            value_grad *= up
        value = value_grad * slope
        if SUMS:
            tl.store(Sums + tile.to(tl.int64) * N + j, tl.sum(value, 0), mask=m_j)
    elif GATED:
        value *= up
    if ADD:
        value += tl.load(out, mask=m, other=0.0)
    tl.store(out, value.to(Out.dtype.element_ty), mask=m)


def _multiply(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, precision: str, *, up: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, pre: torch.Tensor | None = None, dout: torch.Tensor | None = None,
    sums: bool = False, act: str = "none", add: bool = False,
) -> torch.Tensor | None:  # fmt: skip
    """Launch `_kernel`; returns the sums of the rows of Out, if they are wanted."""
    config = _pick(a, precision, up is not None)
    parts = -(-a.shape[0] // config.block_m)
    partial = a.new_empty(parts, b.shape[0], dtype=torch.float32) if sums else None
    tensors = (a, b, up, out, pre, dout, bias, partial)
    remembered(_launch, tensors, precision, act, add)(*tensors)
    return None if partial is None else partial.sum(0).to(a.dtype)


def _pick(a: torch.Tensor, precision: str, gated: bool) -> Config:
    if facts(a.device).arch == 0:
        return _INTERPRETED
    config = CONFIGS[precision if a.dtype == torch.float32 else "half"]
    return config._replace(block_n=64) if gated else config


def _launch(tensors: tuple, precision: str, act: str, add: bool) -> Launch:
    a, b, up, out, pre, dout, bias, partial = tensors
    (rows, k), n, config = a.shape, b.shape[0], _pick(a, precision, up is not None)
    meta = dict(
        ACT=act,
        GATED=up is not None,
        BIAS=bias is not None,
        KEEP=pre is not None,
        GRAD=dout is not None,
        SUMS=partial is not None,
        ADD=add,
        PRECISION=precision if a.dtype == torch.float32 else "ieee",
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP=8,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    strides = (*a.stride(), *b.stride(), *(b if up is None else up).stride())
    steps = (0 if t is None else t.stride(0) for t in (out, pre, dout))
    programs = -(-rows // config.block_m) * -(-n // config.block_n)
    return Launch(_kernel, programs, (rows, n, k, *strides, *steps), meta, config.spill)


def _weights(x: Inputs, o: Options) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight, and the other one if gated."""
    if o.gated and x.up is None:
        half = x.weight.shape[0] // 2
        return x.weight[:half], x.weight[half:]
    return x.weight, x.up


def forward(x: Inputs, o: Options, keep: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, pre); the contract is in reference.py."""
    weight, up = _weights(x, o)
    out, pre = x.x.new_empty(x.x.shape[0], weight.shape[0]), None
    if keep and o.keeps == "pre":
        pre = x.x.new_empty(x.x.shape[0], x.products)
    _multiply(x.x, weight, out, o.precision, up=up, bias=x.bias, pre=pre, act=o.activation)
    return out, pre


def backward(
    x: Inputs, o: Options, kept: torch.Tensor | None, dout: torch.Tensor, needs: tuple[bool, bool, bool],
    into: torch.Tensor | None = None, spend: bool = False,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """(dx, dweight, dup, dbias); the contract is in reference.py."""
    sums = needs[2] and x.bias is not None
    if not o.keeps:
        dz, dbias = dout, dout.sum(0) if sums else None
    elif kept is None:
        weight, up = _weights(x, o)
        dz = x.x.new_empty(x.x.shape[0], x.products)
        dbias = _multiply(
            x.x, weight, dz, o.precision, up=up, bias=x.bias, dout=dout, sums=sums, act=o.activation
        )  # fmt: skip
    else:
        dz, dbias = gradient(kept, dout, o.activation, o.gated, sums, spend)
    n = x.weight.shape[0]
    dx = dweight = dup = None
    if needs[0]:
        dx = x.x.new_empty(x.x.shape)
        if x.up is None:
            _multiply(dz, x.weight.mT, dx, o.precision)
        else:  # the sum of two products, in float32
            total = x.x.new_empty(x.x.shape, dtype=torch.float32)
            _multiply(dz[:, :n], x.weight.mT, total, o.precision)
            _multiply(dz[:, n:], x.up.mT, total, o.precision, add=True)
            dx = dx.copy_(total)
    if needs[1] and into is not None:
        _multiply(dz.mT, x.x.mT, into, o.precision, add=True)
    elif needs[1]:
        dweight = x.weight.new_empty(x.weight.shape)
        _multiply(dz[:, :n].mT, x.x.mT, dweight, o.precision)
        if x.up is not None:
            dup = x.up.new_empty(x.up.shape)
            _multiply(dz[:, n:].mT, x.x.mT, dup, o.precision)
    return dx, dweight, dup, dbias
