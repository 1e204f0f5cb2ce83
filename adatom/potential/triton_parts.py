# mypy: ignore-errors
"""Parts of the potential and their derivatives in one pass over memory each (Triton); parts.py says what they are.

Results do not vary from run to run.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from adatom.operators import on_device
from adatom.tiles.launch import Launch
from adatom.tiles.triton_dense import remembered

Tensor = torch.Tensor


@triton.jit(do_not_specialize=["slots", "rows"])
def _turn_kernel(Y, Low, High, Y2, Amplitudes, Turned, OutLow, OutHigh, OutY, slots, rows,
                 stride_la, stride_ls, stride_lh, stride_ha, stride_hs, stride_hh, stride_ma, stride_ms, stride_mh,
                 stride_ga, stride_gs, stride_gh, stride_oa, stride_os, stride_oh, stride_pa, stride_ps, stride_ph,
                 HEADS: tl.constexpr, SCALARS: tl.constexpr, DEGREE: tl.constexpr, DIM: tl.constexpr,
                 HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, HAS_AMPLITUDES: tl.constexpr,
                 HAS_TURNED: tl.constexpr, HAS_Y2: tl.constexpr, OUT_LOW: tl.constexpr, OUT_HIGH: tl.constexpr,
                 OUT_Y: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
                 BLOCK_C: tl.constexpr):
    """Of BLOCK pairs: OutHigh = Low Y + Amplitudes Y2; OutLow = High Y + Turned Y2, summed over the components of each
    amplitude; OutY = the sum over heads of Low (or Amplitudes) High (or Turned), ADD: to what is there.

    Terms with Y2 are those that Y2 is given for. Scalars are multiplied by 1 with Y, by 0 with Y2. OUT_LOW 2: of
    amplitudes alone.
    """
    i = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[:, None, None]
    h = tl.arange(0, BLOCK_H)[None, :, None]
    c = tl.arange(0, BLOCK_C)[None, None, :]
    a = (i // slots).to(tl.int64)
    s = i % slots
    l = tl.where(c < SCALARS + 3, 0, 1)  # which amplitude multiplies a component
    turned = (c >= SCALARS) & (c < DIM)
    exists = i < rows
    m = exists & (h < HEADS) & (c < DIM)
    o_y = i.to(tl.int64) * (DIM - SCALARS) + c - SCALARS
    y = tl.load(Y + o_y, mask=exists & turned, other=1.0)
    if HAS_Y2:
        y2 = tl.load(Y2 + o_y, mask=exists & turned, other=0.0)
    if HAS_LOW:
        o_low = tl.where(c < SCALARS, c, SCALARS + l)
        low = tl.load(Low + a * stride_la + s * stride_ls + h * stride_lh + o_low, mask=m, other=0.0)
    if HAS_HIGH:
        high = tl.load(High + a * stride_ha + s * stride_hs + h * stride_hh + c, mask=m, other=0.0)
    if HAS_AMPLITUDES:
        low2 = tl.load(Amplitudes + a * stride_ma + s * stride_ms + h * stride_mh + l, mask=m & turned, other=0.0)
    if HAS_TURNED:
        o_turned = a * stride_ga + s * stride_gs + h * stride_gh + c - SCALARS
        high2 = tl.load(Turned + o_turned, mask=m & turned, other=0.0)
    if OUT_HIGH:
        if HAS_LOW and HAS_Y2:
            x = low * y + low2 * y2
        elif HAS_LOW:
            x = low * y
        else:
            x = low2 * y2
        tl.store(OutHigh + a * stride_pa + s * stride_ps + h * stride_ph + c, x, mask=m)
    if OUT_LOW:
        if HAS_HIGH and HAS_Y2:
            x = high * y + high2 * y2
        elif HAS_HIGH:
            x = high * y
        else:
            x = high2 * y2
        to = OutLow + a * stride_oa + s * stride_os + h * stride_oh
        if OUT_LOW == 1:
            tl.store(to + c, x, mask=m & (c < SCALARS))
        for n in tl.static_range(DEGREE):
            amplitude = tl.sum(tl.where(turned & (l == n), x, 0.0), 2, keep_dims=True)
            tl.store(to + (n + (SCALARS if OUT_LOW == 1 else 0)), amplitude, mask=exists & (h < HEADS))
    if OUT_Y:
        x = tl.sum((low if HAS_LOW else low2) * (high if HAS_HIGH else high2), 1, keep_dims=True)
        if ADD:
            x += tl.load(OutY + o_y, mask=exists & turned, other=0.0)
        tl.store(OutY + o_y, x, mask=exists & turned)


def _turn_launch(tensors: tuple, scalars: int, add: bool) -> Launch:
    y, low, high, y2, amplitudes, turned, out_low, out_high, out_y = tensors
    atoms, slots, components = y.shape
    degree = 1 if components == 3 else 2
    strided = (low, high, amplitudes, turned, out_low, out_high)
    heads = next(t.shape[2] for t in strided if t is not None)
    block_h, block_c = triton.next_power_of_2(heads), triton.next_power_of_2(scalars + components)
    block = max(1, 2048 // (block_h * block_c))
    numbers = (slots, atoms * slots, *(n for t in strided for n in ((0, 0, 0) if t is None else t.stride()[:3])))
    names = ("LOW", "HIGH", "AMPLITUDES", "TURNED")
    meta = {f"HAS_{name}": t is not None for name, t in zip(names, strided)} | dict(
        HEADS=heads, SCALARS=scalars, DEGREE=degree, DIM=scalars + components, HAS_Y2=y2 is not None,
        OUT_LOW=0 if out_low is None else 2 if out_low.shape[3] == degree else 1, OUT_HIGH=out_high is not None,
        OUT_Y=out_y is not None, ADD=add, BLOCK=block, BLOCK_H=block_h, BLOCK_C=block_c, num_warps=4,
    )  # fmt: skip
    return Launch(_turn_kernel, -(-atoms * slots // block), numbers, meta)


def _turn(scalars: int, add: bool, *tensors: Tensor | None) -> None:
    """The kernel on (y, low, high, y2, amplitudes, turned, out_low, out_high, out_y), None where absent.

    y and y2 (atoms, slots, components) are contiguous; the last dimension of all others is. They are (atoms, slots,
    heads, n) with n: low, scalars + degree; high, scalars + components; amplitudes, degree; turned, components.
    out_low may be of amplitudes alone (scalars > 0).
    """
    on_device(remembered(_turn_launch, tensors, scalars, add), tensors[0], *tensors)


@triton.jit(do_not_specialize=["size"])
def _silu_kernel(Z, G, C, Out, OutG, size, ORDER: tl.constexpr, BLOCK: tl.constexpr):
    """ORDER 0: Out = silu(Z). 1: Out = G silu'(Z). 2: Out = C G silu''(Z), OutG = C silu'(Z)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = i < size
    z = tl.load(Z + i, mask=m, other=0.0)
    s = 1.0 / (1.0 + tl.exp(-z))
    if ORDER == 0:
        tl.store(Out + i, z * s, mask=m)
    else:
        slope = s * (1.0 - s)
        first = s + z * slope
        g = tl.load(G + i, mask=m, other=0.0)
        if ORDER == 1:
            tl.store(Out + i, g * first, mask=m)
        else:
            c = tl.load(C + i, mask=m, other=0.0)
            tl.store(OutG + i, c * first, mask=m)
            tl.store(Out + i, c * g * (slope * (2.0 + z * (1.0 - 2.0 * s))), mask=m)


def _silu_launch(tensors: tuple, order: int) -> Launch:
    size = tensors[0].numel()
    return Launch(_silu_kernel, -(-size // 1024), (size,), {"ORDER": order, "BLOCK": 1024, "num_warps": 4})


def _silu(order: int, *tensors: Tensor | None) -> None:
    """The kernel on (z, g, c, out, out_g), contiguous and of one size, None where absent."""
    on_device(remembered(_silu_launch, tensors, order), tensors[0], *tensors)


@triton.jit(do_not_specialize=["rows"])
def _swap_kernel(X, Reverse, Add, Out, rows, WIDTH: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
                 BLOCK_C: tl.constexpr):
    i = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[:, None]
    c = tl.arange(0, BLOCK_C)[None, :]
    m = (i < rows) & (c < WIDTH)
    x = tl.load(X + tl.load(Reverse + i, mask=i < rows, other=0).to(tl.int64) * WIDTH + c, mask=m, other=0.0)
    if ADD:
        x += tl.load(Add + i.to(tl.int64) * WIDTH + c, mask=m, other=0.0)
    tl.store(Out + i.to(tl.int64) * WIDTH + c, x, mask=m)


def _swap_launch(tensors: tuple) -> Launch:
    rows, width = tensors[0].shape
    block_c = triton.next_power_of_2(width)
    block = max(1, 2048 // block_c)
    meta = {"WIDTH": width, "ADD": tensors[2] is not None, "BLOCK": block, "BLOCK_C": block_c, "num_warps": 4}
    return Launch(_swap_kernel, -(-rows // block), (rows,), meta)


def _swap(*tensors: Tensor | None) -> None:
    """out = x[reverse] (+ add) on (x, reverse, add, out), contiguous (rows, width); add may be None."""
    on_device(remembered(_swap_launch, tensors), tensors[0], *tensors)


def _rows(x: Tensor) -> Tensor:
    """x (atoms, heads, slots, components) as kernels take it: slots before heads."""
    return (x if x.stride(-1) == 1 else x.contiguous()).transpose(1, 2)


class Turn(Function):
    """q, k, v and the amplitudes: those are all of x that derivatives need, and as results they are in the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scalars: int, heads: tuple[int, ...]) -> Any:
        amplitudes = x[..., scalars:].contiguous()
        ctx.save_for_backward(amplitudes, y)
        ctx.of = scalars, heads
        ctx.set_materialize_grads(False)
        high = x.new_empty(*x.shape[:3], scalars + y.shape[-1])
        _turn(scalars, False, y, x, None, None, None, None, None, high, None)
        return *high.transpose(1, 2).split(heads, 1), amplitudes

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (amplitudes, y), (scalars, heads) = ctx.saved_tensors, ctx.of
        atoms, slots, components = y.shape
        dim = scalars + components
        given = (y.new_zeros(atoms, n, slots, dim) if g is None else g for n, g in zip(heads, grads))
        return *_TurnBack.apply(amplitudes, y, scalars, heads, *given, grads[-1]), None, None


class _TurnBack(Function):
    @staticmethod
    def forward(
        ctx: Any, amplitudes: Tensor, y: Tensor, scalars: int, heads: tuple[int, ...], *given: Any
    ) -> tuple[Tensor, Tensor]:
        *grads, of_amplitudes = given
        ctx.save_for_backward(amplitudes, y, *(_rows(g)[..., scalars:].contiguous() for g in grads))
        ctx.of = scalars, heads, of_amplitudes is not None
        dx, dy = y.new_empty(*amplitudes.shape[:3], scalars + amplitudes.shape[-1]), torch.empty_like(y)
        for n, (low, out, g) in enumerate(zip(amplitudes.split(heads, 2), dx.split(heads, 2), grads)):
            _turn(scalars, n > 0, y, None, _rows(g), None, low, None, out, None, dy)
        if of_amplitudes is not None:
            dx[..., scalars:] += of_amplitudes
        return dx, dy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cx: Tensor, cy: Tensor) -> Any:
        (amplitudes, y, *turned), (scalars, heads, moved) = ctx.saved_tensors, ctx.of
        cx, cy = cx.contiguous(), cy.contiguous()
        da, dy = torch.empty_like(amplitudes), torch.empty_like(y)
        high = y.new_empty(*cx.shape[:3], scalars + y.shape[-1])
        pieces = zip(*(t.split(heads, 2) for t in (cx, amplitudes, da, high)), turned)
        for n, (c, low, out, of_g, g) in enumerate(pieces):
            _turn(scalars, n > 0, y, c, None, cy, low, g, out, of_g, dy)
        return da, dy, None, None, *high.transpose(1, 2).split(heads, 1), cx[..., scalars:] if moved else None


class Seen(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scalars: int) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.scalars = scalars
        atoms, heads, slots, _ = x.shape
        low = x.new_empty(atoms, slots, heads, scalars + (1 if y.shape[-1] == 3 else 2))
        _turn(scalars, False, y, None, _rows(x), None, None, None, low, None, None)
        return low

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return *_SeenBack.apply(x, y, ctx.scalars, grads[0].contiguous()), None


class _SeenBack(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scalars: int, g: Tensor) -> Any:
        ctx.save_for_backward(x, y, g[..., scalars:].contiguous())
        ctx.scalars = scalars
        dx, dy = torch.empty_like(x), torch.empty_like(y)
        turned = _rows(x)[..., scalars:]
        _turn(scalars, False, y, g, None, None, None, turned, None, dx.transpose(1, 2), dy)
        return dx, dy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cx: Tensor, cy: Tensor) -> Any:
        (x, y, amplitudes), scalars = ctx.saved_tensors, ctx.scalars
        dx, dy = torch.empty_like(x), torch.empty_like(y)
        dg = y.new_empty(*amplitudes.shape[:3], scalars + amplitudes.shape[-1])
        turned, out = _rows(x)[..., scalars:], dx.transpose(1, 2)
        _turn(scalars, False, y, None, _rows(cx), cy.contiguous(), amplitudes, turned, dg, out, dy)
        return dx, dy, None, dg


class Silu(Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        out = torch.empty_like(z)
        _silu(0, z, None, None, out, None)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _SiluBack.apply(*ctx.saved_tensors, grads[0].contiguous())


class _SiluBack(Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, g: Tensor) -> Tensor:
        ctx.save_for_backward(z, g)
        dz = torch.empty_like(z)
        _silu(1, z, g, None, dz, None)
        return dz

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        z, g = ctx.saved_tensors
        dz, dg = torch.empty_like(z), torch.empty_like(z)
        _silu(2, z, g, grads[0].contiguous(), dz, dg)
        return dz, dg


class Swap(Function):
    """Its own inverse and its own derivative, but for what is added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, reverse: Tensor, add: Tensor | None) -> Tensor:
        ctx.reverse = reverse
        x = x.contiguous()
        out = torch.empty_like(x)
        _swap(x, reverse, None if add is None else add.contiguous(), out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return Swap.apply(grads[0], ctx.reverse, None), None, grads[0] if ctx.needs_input_grad[2] else None
