"""moe by PyTorch's own kernels: pairs sorted by expert, grouped products, sums over top_k in order of the tokens.

Nothing is scattered: each token gathers its pairs' rows and adds them in float32, so results do not vary. Gathered rows
live only while a product needs them.
"""

from __future__ import annotations

import torch

from adatom.ops.linear.torch_linear import VALUES, gradient
from adatom.ops.moe.problem import Inputs, Options, Tensor, inverse_of, plan, present
from adatom.ops.moe.torch_grouped import grouped, outer


def forward(x: Inputs, o: Options, keep: bool) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """(out, pre, order, offsets); the contract is in reference.py."""
    return _forward(x, o, keep, None)


def differentiable(x: Inputs, o: Options) -> Tensor:
    """out by operators that PyTorch differentiates in any mode."""
    return _forward(x, o, False, "blocks")[0]


def _forward(x: Inputs, o: Options, keep: bool, how: str | None) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    order, offsets = plan(x.indices, x.experts)
    h = grouped(_gathered(x.x, order, x.top_k), x.w_gate_up, offsets, how)
    y = grouped(_gated(h, o), x.w_down, offsets, how)
    weights = torch.where(present(x.indices, x.experts), x.weights, 0)
    return _combined(y, order, x, weights), h if keep else None, order, offsets


def backward(
    x: Inputs, o: Options, pre: Tensor | None, order: Tensor, offsets: Tensor, dout: Tensor,
    needs: tuple[bool, bool, bool, bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """(dx, dweights, dw_gate_up, dw_down); the contract is in reference.py."""
    need_x, need_weights, need_gate_up, need_down = needs
    dx = dweights = dw_gate_up = dw_down = None
    rows = None if pre is not None and not need_gate_up else _gathered(x.x, order, x.top_k)
    if pre is None:
        assert rows is not None
        pre = grouped(rows, x.w_gate_up, offsets)
    share = x.weights.reshape(-1, 1).index_select(0, order)
    grads, a = _gathered(dout, order, x.top_k), _gated(pre, o)
    if need_down:
        dw_down = outer(grads, (a * share).to(a.dtype), offsets)
    if need_x or need_weights or need_gate_up:
        v = grouped(grads, x.w_down.mT, offsets)
        del grads
        if need_weights:
            wide = torch.promote_types(a.dtype, torch.float32)
            dots = (a.to(wide) * v).sum(1).index_select(0, inverse_of(order))
            dweights = dots.view(x.indices.shape).to(x.weights.dtype)
        if need_x or need_gate_up:
            dh = gradient(None, o.gate, pre, (v * share).to(v.dtype))  # type: ignore[arg-type]
            if need_gate_up:
                assert rows is not None
                dw_gate_up = outer(dh, rows, offsets)
            if need_x:
                dx = _combined(grouped(dh, x.w_gate_up.mT, offsets), order, x)
    return dx, dweights, dw_gate_up, dw_down


def _gathered(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """The row of each pair's token, (pairs, columns), in the order of the pairs."""
    return x.index_select(0, order // max(top_k, 1))


def _gated(h: Tensor, o: Options) -> Tensor:
    gate, up = h.chunk(2, 1)
    return VALUES[o.activation](gate) * up


def _combined(y: Tensor, order: Tensor, x: Inputs, weights: Tensor | None = None) -> Tensor:
    """The sum of each token's rows of y (pairs, hidden), weighted, in float32."""
    places = inverse_of(order).view(x.indices.shape)
    out = y.new_zeros(x.x.shape, dtype=torch.promote_types(y.dtype, torch.float32))
    for k in range(x.top_k):
        rows = y.index_select(0, places[:, k])
        out = out + (rows if weights is None else rows * weights[:, k : k + 1].to(out.dtype))
    return out.to(y.dtype)
