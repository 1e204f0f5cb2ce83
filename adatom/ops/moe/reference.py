"""A mixture of experts and its derivatives in plain PyTorch: the judge. Dense: every expert sees every token.

h_e = x W_e^T (W = w_gate_up), a_e = act(h_gate) * h_up, y_e = a_e V_e^T (V = w_down), and with c_e[t] the sum of the
weights that token t gives to expert e,

    out[t] = sum over e of c_e[t] y_e[t].

No y is needed backwards: with v_e = dout V_e, the gradient of a_e is c_e v_e, and of a weight <y, dout> = <a, v>;

    dh_e = gradient(h_e, c_e v_e),   dx = sum over e of dh_e W_e,   dW_e = dh_e^T x,   dV_e = dout^T (c_e a_e).

Source: that order of the backward is SonicMoE's, arXiv:2512.14080.
"""

from __future__ import annotations

import torch

from adatom.ops.linear.reference import gradient, value
from adatom.ops.moe.problem import Inputs, Options, Tensor, plan


def _share(x: Inputs, e: int) -> Tensor:
    """c_e (tokens, 1), in at least float32."""
    wide = torch.promote_types(x.weights.dtype, torch.promote_types(x.x.dtype, torch.float32))
    return torch.where(x.indices == e, x.weights.to(wide), 0).sum(1, keepdim=True)


def forward(x: Inputs, o: Options, keep: bool) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """(out (tokens, hidden), pre, order, offsets).

    order, offsets: see problem.plan. pre: h of each pair in that order, (pairs, 2 * intermediate), 0 for dropped pairs;
    None unless keep.
    """
    order, offsets = plan(x.indices, x.experts)
    out = x.x.new_zeros(x.x.shape, dtype=torch.promote_types(x.x.dtype, torch.float32))
    pre = x.x.new_zeros(x.pairs, x.w_gate_up.shape[1]) if keep else None
    pair_expert, pair_token = x.indices.reshape(-1)[order], order // max(x.top_k, 1)
    for e in range(x.experts):
        h = x.x @ x.w_gate_up[e].mT
        y = value(h, o.gate) @ x.w_down[e].mT
        out = out + torch.where((x.indices == e).any(1, keepdim=True), _share(x, e) * y, 0)
        if pre is not None:
            pre = torch.where((pair_expert == e)[:, None], h[pair_token], pre)
    return out.to(x.x.dtype), pre, order, offsets


def backward(
    x: Inputs, o: Options, pre: Tensor | None, order: Tensor, offsets: Tensor, dout: Tensor,
    needs: tuple[bool, bool, bool, bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """(dx, dweights, dw_gate_up, dw_down), None for what `needs` leaves out.

    pre, order, offsets: what the forward returned; pre is None if it kept nothing: it is computed again (here always).
    """
    wide = torch.promote_types(x.x.dtype, torch.float32)
    dx, dweights = x.x.new_zeros(x.x.shape, dtype=wide), torch.zeros_like(x.weights)
    dw_gate_up, dw_down = (w.new_zeros(w.shape) for w in (x.w_gate_up, x.w_down))  # contiguous, as fakes say
    for e in range(x.experts):
        mine = (x.indices == e).any(1, keepdim=True)
        rows, douts = torch.where(mine, x.x, 0), torch.where(mine, dout, 0)
        h = rows @ x.w_gate_up[e].mT
        a, v, c = value(h, o.gate), douts @ x.w_down[e], _share(x, e)
        dots = (a.to(wide) * v.to(wide)).sum(1, keepdim=True).to(dweights.dtype)
        dweights = torch.where(x.indices == e, dots, dweights)
        dh = gradient(h, (c * v).to(h.dtype), o.gate)
        dx = dx + dh @ x.w_gate_up[e]
        dw_gate_up[e] = dh.mT @ rows
        dw_down[e] = douts.mT @ (c * a).to(a.dtype)
    grads = (dx.to(x.x.dtype), dweights, dw_gate_up, dw_down)
    return tuple(g if need else None for g, need in zip(grads, needs))
