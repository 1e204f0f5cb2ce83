"""Known-wrong kernels, each a small change to a right one, that verify must refuse; the right one must pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from adatom import verify
from adatom.ops.attention import reference
from adatom.ops.attention.cases import Case
from adatom.ops.attention.problem import empty_out
from adatom.registry import Row

BF16, F32 = torch.bfloat16, torch.float32


def drops_the_last_keys(x, o):
    """The keys of the last block, where it is not whole, are never read."""
    whole = x.k.shape[2] // 16 * 16
    return reference.forward(x._replace(k=x.k[:, :, :whole], v=x.v[:, :, :whole]), o)


def lse_in_base_2(x, o):
    out, lse = reference.forward(x, o)
    return out, lse / math.log(2)


def leaves_the_last_query_unwritten(x, o):
    true, lse = reference.forward(x, o)
    out = empty_out(x.q, x.v)
    out[:, :, :-1] = true[:, :, :-1]
    return out, lse


def aligns_causal_top_left(x, o):
    """Query i sees keys up to i, whatever the lengths."""
    return reference.forward(x, o._replace(causal=False, window_right=x.q.shape[2] - x.k.shape[2]))


def computes_in_half(x, o):
    half = x._replace(q=x.q.half(), k=x.k.half(), v=x.v.half())
    out, lse = reference.forward(half, o)
    return out.to(x.q.dtype), lse


def sums_in_any_order(x, o):
    order = torch.randperm(x.k.shape[2])
    return reference.forward(x._replace(k=x.k[:, :, order], v=x.v[:, :, order]), o)


def one_row_off(x, o):
    """One row among thousands, by a fifth: too little to show in a norm over all of them."""
    out, lse = reference.forward(x, o)
    out[0, 0, 200] *= 1.2
    return out, lse


def nothing_seen_gives_nan(x, o):
    out, lse = reference.forward(x, o)
    return out.masked_fill(lse[..., None].isinf(), math.nan), lse


def returns_float32(x, o):
    out, lse = reference.forward(x, o)
    return out.float(), lse


def forgets_delta(x, o, out, lse, dout, dlse, bias_grad):
    """dS = P dP, without what the softmax takes off every row."""
    return reference.backward(x, o, torch.zeros_like(out), lse, dout, None, bias_grad)


def forgets_dlse(x, o, out, lse, dout, dlse, bias_grad):
    return reference.backward(x, o, out, lse, dout, None, bias_grad)


def bias_gradient_of_the_first_batch(x, o, out, lse, dout, dlse, bias_grad):
    """Where the batch shares a bias, only its first element is counted."""
    dq, dk, dv, _, dsinks = reference.backward(x, o, out, lse, dout, dlse, bias_grad)
    first = x._replace(q=x.q[:1], k=x.k[:1], v=x.v[:1])
    one = reference.backward(first, o, out[:1], lse[:1], dout[:1], None if dlse is None else dlse[:1], bias_grad)
    return dq, dk, dv, one[3], dsinks


def key_gradient_of_the_first_head(x, o, out, lse, dout, dlse, bias_grad):
    """Where heads share keys, only the first head of each group is counted."""
    dq, _, dv, dbias, dsinks = reference.backward(x, o, out, lse, dout, dlse, bias_grad)
    group = x.q.shape[1] // x.k.shape[1]
    dlse = None if dlse is None else dlse[:, ::group]
    one = reference.backward(
        x._replace(q=x.q[:, ::group]), o, out[:, ::group], lse[:, ::group], dout[:, ::group], dlse, bias_grad
    )
    return dq, one[1], dv, dbias, dsinks


def takes_out_and_lse_for_constants(x, o, out, lse, dout, dlse, *more):
    """What autograd makes of a backward that keeps out and lse but not how they depend on q, k and v."""
    *dd, bias_grad = more
    q, k, v, dout = (t.detach().requires_grad_() for t in (x.q, x.k, x.v, dout))
    grads = reference.backward(x._replace(q=q, k=k, v=v), o, out, lse, dout, dlse, bias_grad)
    along = [(g, d) for g, d in zip(grads[:3], dd) if d is not None]
    dq2, dk2, dv2, ddout = torch.autograd.grad([g for g, _ in along], (q, k, v, dout), [d for _, d in along])
    ddlse = reference.backward_backward(x, o, out, lse, dout.detach(), dlse, *dd, bias_grad)[-1]
    return dq2, dk2, dv2, None, None, ddout, ddlse


def forgets_u(x, o, out, lse, dout, dlse, *more):
    """E = dS (G - g) + P H: the rows of P H keep their mean."""
    dq2, dk2, dv2, *rest = reference.backward_backward(x, o, out, lse, dout, dlse, *more)
    p = torch.exp(o.scale * x.q @ x.k.mT - lse[..., None])
    u = (dout * rest[2]).sum(-1, keepdim=True)
    return dq2 + o.scale * (p * u) @ x.k, dk2 + o.scale * (p * u).mT @ x.q, dv2, *rest


def tangent_without_the_bias(x, o, out, lse, tq, tk, tv, tbias, tsinks):
    return reference.jvp(x, o, out, lse, tq, tk, tv, None, tsinks)


class Wrong(NamedTuple):
    """A launcher, the pass it is wrong in, the case that must show it and the outputs that it may show in."""

    launcher: Callable[..., Any]
    op: str
    case: Case
    outputs: str


PLAIN = Case("plain", 2, 2, 2, 33, 37, 16, 16, F32)
WRONG = (
    Wrong(drops_the_last_keys, "attention_fwd", PLAIN, "out"),
    Wrong(drops_the_last_keys, "attention_fwd", PLAIN._replace(dtype=BF16), "out"),
    Wrong(lse_in_base_2, "attention_fwd", PLAIN, "lse"),
    Wrong(leaves_the_last_query_unwritten, "attention_fwd", PLAIN, "out"),
    Wrong(aligns_causal_top_left, "attention_fwd", PLAIN._replace(seqlen_q=41, seqlen_k=13, causal=True), "lse"),
    Wrong(aligns_causal_top_left, "attention_fwd", PLAIN._replace(seqlen_q=13, causal=True), "out"),
    Wrong(computes_in_half, "attention_fwd", PLAIN, "out"),
    Wrong(sums_in_any_order, "attention_fwd", PLAIN, "out"),
    Wrong(one_row_off, "attention_fwd", Case("long", 1, 8, 8, 256, 256, 8, 8, BF16, causal=True), "out"),
    Wrong(nothing_seen_gives_nan, "attention_fwd", PLAIN._replace(seqlen_q=41, seqlen_k=13, causal=True), "out"),
    Wrong(returns_float32, "attention_fwd", PLAIN._replace(dtype=BF16), "out"),
    Wrong(forgets_delta, "attention_bwd", PLAIN, "dq"),
    Wrong(forgets_dlse, "attention_bwd", PLAIN, "dq"),
    Wrong(bias_gradient_of_the_first_batch, "attention_bwd", PLAIN._replace(bias="1hqk"), "dbias"),
    Wrong(key_gradient_of_the_first_head, "attention_bwd", PLAIN._replace(heads=4), "dk"),
    Wrong(takes_out_and_lse_for_constants, "attention_bwd_bwd", PLAIN, "ddout dq2 dk2 dv2"),
    Wrong(forgets_u, "attention_bwd_bwd", PLAIN, "dq2 dk2"),
    Wrong(tangent_without_the_bias, "attention_jvp", PLAIN._replace(bias="11qk"), "tout tlse"),
)
RIGHT = {
    "attention_fwd": reference.forward,
    "attention_bwd": reference.backward,
    "attention_bwd_bwd": reference.backward_backward,
    "attention_jvp": reference.jvp,
}


def anything(problem: Any) -> None:
    """Every problem is fit."""


def judged(op: str, launcher: Callable[..., Any], case: Case) -> verify.Result:
    (result,) = verify.run(op, [case], [Row(op, "mine", launcher, anything)], "cpu")  # type: ignore[arg-type]
    return result


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: w.launcher.__name__)
def test_wrong_kernel_is_refused(wrong):
    result = judged(wrong.op, wrong.launcher, wrong.case)
    assert not result.ok
    assert result.output in wrong.outputs.split() and result.problem


@pytest.mark.parametrize("op, case", sorted({(w.op, w.case) for w in WRONG}, key=str))
def test_right_kernel_passes(op, case):
    result = judged(op, RIGHT[op], case)
    assert result.ok and not result.problem


def test_a_kernel_that_raises_is_refused_and_says_so():
    def raises(x, o):
        raise RuntimeError("out of shared memory")

    result = judged("attention_fwd", raises, PLAIN)
    assert not result.ok and result.problem == "raised RuntimeError: out of shared memory"


def test_a_missing_result_is_refused():
    def no_bias_gradient(*args):
        dq, dk, dv, _, dsinks = reference.backward(*args)
        return dq, dk, dv, None, dsinks

    result = judged("attention_bwd", no_bias_gradient, PLAIN._replace(bias="1hqk"))
    assert not result.ok and (result.output, result.problem) == ("dbias", "missing")


def test_a_row_marked_as_varying_may_differ_from_run_to_run():
    row = Row("attention_fwd", "mine", sums_in_any_order, anything, deterministic=False)  # type: ignore[arg-type]
    assert all(result.ok for result in verify.run(cases=[PLAIN], rows=[row], device="cpu"))
