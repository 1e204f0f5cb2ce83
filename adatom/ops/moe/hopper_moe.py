"""moe on Hopper: which kernels make a forward and a backward, and what lies between them.

TMA cannot gather rows on sm_90. Where it costs a forward's first product less than a pass over copies, its producers
gather rows of x by cp.async. Else rows of x, and of dout, are copied for the pairs and the copies given up after the
product that wants them (docs/moe.md).
"""

from __future__ import annotations

import torch

from adatom.ops.moe import triton_moe
from adatom.ops.moe.hopper_outer import outer
from adatom.ops.moe.hopper_products import column_tiles, lines_of, product, rows_of
from adatom.ops.moe.problem import Inputs, Options, Tensor
from adatom.ops.moe.triton_combine import combine
from adatom.ops.moe.triton_order import order as order_of
from adatom.ops.moe.triton_order import places_of
from adatom.ops.moe.triton_rows import at_places, clear_dropped, spread

# to so many rows of an expert, on average, and intermediate features
GATHERED = ((200, 4096), (600, 1536), (1024, 768))
FEW = 200  # rows of an expert, on average, below which Triton's products are faster: they gather rows themselves


def forward(x: Inputs, o: Options, keep: bool) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """(out, pre, order, offsets); the contract is in reference.py."""
    order, offsets, places = order_of(x.indices, x.experts)
    lines = lines_of(offsets, x.pairs, rows_of(x.pairs, x.experts))
    wide = x.w_down.shape[2]
    a, pre = x.x.new_empty(x.pairs, wide), x.x.new_empty(x.pairs, 2 * wide) if keep else None
    near = x.x.shape[0] * x.x.stride(0) < 2**34  # rows are found by 32 bits, in units of 8
    if near and any(x.pairs < rows * x.experts and wide <= most for rows, most in GATHERED):
        product(x.x, x.w_gate_up, a, lines, 0, act=o.activation, pre=pre, order=order, top_k=x.top_k)
    else:
        product(spread(x.x, places, offsets), x.w_gate_up, a, lines, 0, act=o.activation, pre=pre)
    if pre is not None:
        clear_dropped(pre, offsets)
    y = x.x.new_empty(x.pairs, x.x.shape[1])
    product(a, x.w_down, y, lines, 1)
    return combine(y, places, x.top_k, x.weights, offsets=offsets), pre, order, offsets


def backward(
    x: Inputs, o: Options, pre: Tensor | None, order: Tensor, offsets: Tensor, dout: Tensor,
    needs: tuple[bool, bool, bool, bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """(dx, dweights, dw_gate_up, dw_down); the contract is in reference.py."""
    if x.pairs < FEW * x.experts:
        sums = lambda a, b, offsets, like: outer(a, b, offsets)  # noqa: E731
        return triton_moe.backward(x, o, pre, order, offsets, dout, needs, sums)
    need_x, need_weights, need_gate_up, need_down = needs
    dx = dweights = dw_gate_up = dw_down = None
    lines, places, wide = lines_of(offsets, x.pairs), places_of(order), x.w_down.shape[2]
    if pre is None:
        pre = x.x.new_empty(x.pairs, 2 * wide)
        product(spread(x.x, places, offsets), x.w_gate_up, pre, lines, 0)
    shares, dh = x.x.new_empty(x.pairs, wide), torch.empty_like(pre)
    dots = x.x.new_empty(column_tiles(wide), x.pairs, dtype=torch.float32)
    douts = spread(dout, places, offsets)
    product(
        douts, x.w_down, shares, lines, 1, act=o.activation, pre=pre, into=dh, order=order,
        weights=x.weights.contiguous(), dots=dots, cols=True,
    )  # fmt: skip
    if need_down:
        dw_down = outer(douts, shares, offsets)
    del douts, shares
    if need_weights:
        dweights = at_places(dots, places, offsets, x.weights)
    if need_x:
        dy = x.x.new_empty(x.pairs, x.x.shape[1])
        product(dh, x.w_gate_up, dy, lines, 2, cols=True)
        dx = combine(dy, places, x.top_k, offsets=offsets)
        del dy
    if need_gate_up:
        dw_gate_up = outer(dh, spread(x.x, places, offsets), offsets)
    return dx, dweights, dw_gate_up, dw_down
