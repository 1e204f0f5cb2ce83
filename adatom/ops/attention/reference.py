"""The judge and the documentation: attention and its derivatives as formulas, in plain quadratic PyTorch.

Notation, for one batch and head, with q (m, d), k (n, d), v (n, e) and dO the cotangent of the output O:

    raw = scale q k^T        s = c tanh(raw / c) with softcap c, else raw        S = s + bias, -inf where masked
    lse = log(sum_j exp S_ij + exp sink)        P = exp(S - lse)        Psink = exp(sink - lse)        O = P v

A query that sees nothing has lse = -inf, P = 0, O = 0 and zero derivatives. float16 and bfloat16 are computed in
float32; float32 and float64 in their own precision. The derivation of the second derivative is in
docs/double_backward.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, NamedTuple

import torch

from adatom.ops.attention.problem import Inputs, Options, bias_of_each, empty_like, empty_lse, empty_out, sum_to_bias

Tensor = torch.Tensor


def wide(x: Tensor) -> Tensor:
    """x in the precision of the arithmetic: float64 stays, every other float becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def visible(x: Inputs, o: Options, rows: slice, keys: slice, kv_lens: Tensor | None) -> Tensor | None:
    """Which of `keys` each of the query `rows` may see: bool (batch or 1, 1, rows, keys); None if all are seen.

    kv_lens: those of the batches in question, (batch,). Masks align bottom-right: the last query sees the last key.
    """
    if kv_lens is None and not o.causal and o.window_left < 0 and o.window_right < 0:
        return None
    i = torch.arange(rows.start, rows.stop, device=x.q.device)[:, None]
    j = torch.arange(keys.start, keys.stop, device=x.q.device)[None, :]
    seqlen_q, seqlen_k = x.q.shape[2], x.k.shape[2]
    len_k: Any = seqlen_k if kv_lens is None else kv_lens.clamp(0, seqlen_k)[:, None, None, None]
    seen = j < len_k
    at = i + (len_k - seqlen_q)  # the key that lies on the diagonal
    if o.causal:
        seen = seen & (j <= at)
    if o.window_left >= 0:
        seen = seen & (j >= at - o.window_left)
    if o.window_right >= 0:
        seen = seen & (j <= at + o.window_right)
    return seen if seen.dim() == 4 else seen.expand(1, 1, *seen.shape[-2:])


# Packed batches: one sequence after another ------------------------------------------------------------------------


def spans(x: Inputs) -> Iterator[tuple[slice, slice]]:
    """The query tokens and the key tokens of each sequence of a packed batch."""
    assert x.cu_seqlens_q is not None and x.cu_seqlens_k is not None
    ends_q, ends_k = x.cu_seqlens_q.tolist(), x.cu_seqlens_k.tolist()
    for i in range(len(ends_q) - 1):
        yield slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])


def _cut(letter: str, t: Any, rows: slice, keys: slice) -> Any:
    """One sequence's part of t as a batch of one: a view."""
    if t is None or letter in "s-":
        return t
    if letter == "l":
        return t[:, rows][None]
    return t[rows if letter in "qo" else keys].transpose(0, 1)[None]


def by_sequence(takes: str, gives: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a launcher of padded batches take packed ones too.

    takes, gives: one letter for each argument after (x, o) and for each result: q, k, v, o for (tokens, heads, dim)
    like q, k, v and out; l like lse (heads, tokens); s like sinks (heads,), summed over sequences; - for the rest.
    """

    def decorate(launcher: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(launcher)
        def packed(x: Inputs, o: Options, *args: Any) -> Any:
            if x.cu_seqlens_q is None:
                return launcher(x, o, *args)
            sinks = None if x.sinks is None else wide(x.sinks)  # so that sums over sequences are rounded once
            whole = {
                "q": lambda: empty_like(x.q),
                "k": lambda: empty_like(x.k),
                "v": lambda: empty_like(x.v),
                "o": lambda: empty_out(x.q, x.v),
                "l": lambda: empty_lse(x.q),
                "s": lambda: None if sinks is None else torch.empty_like(sinks),
                "-": lambda: None,
            }
            results = [whole[letter]() for letter in gives]
            for result in results:
                if result is not None:
                    result.zero_()
            for rows, keys in spans(x):
                q, k, v = _cut("q", x.q, rows, keys), _cut("k", x.k, rows, keys), _cut("v", x.v, rows, keys)
                cut = (_cut(letter, a, rows, keys) for letter, a in zip(takes, args, strict=True))
                for letter, result, part in zip(gives, results, launcher(Inputs(q, k, v, None, sinks), o, *cut)):
                    if letter == "s" and part is not None:
                        result += part
                    elif letter not in "s-":
                        _cut(letter, result, rows, keys).copy_(part)
            dtype = None if x.sinks is None else x.sinks.dtype
            return tuple(r.to(dtype) if letter == "s" and r is not None else r for letter, r in zip(gives, results))

        return packed

    return decorate


# Pieces that several derivatives share -----------------------------------------------------------------------------


def _padding(x: Inputs) -> Tensor | None:
    """The keys beyond kv_lens, bool (batch, 1, seqlen_k, 1): what is stored there counts for nothing, NaN included."""
    if x.kv_lens is None:
        return None
    return (torch.arange(x.k.shape[2], device=x.k.device) >= x.kv_lens[:, None])[:, None, :, None]


def _keys(x: Inputs, t: Tensor) -> Tensor:
    """t, like k or v, with one copy for each query head: (batch, heads, seqlen_k, dim)."""
    padding = _padding(x)
    t = wide(t) if padding is None else wide(t).masked_fill(padding, 0.0)
    return t.repeat_interleave(x.q.shape[1] // max(t.shape[1], 1), dim=1)


def _grouped(x: Inputs, t: Tensor) -> Tensor:
    """The adjoint of _keys: sums over the query heads that share a key head. (batch, kv_heads, seqlen_k, dim)."""
    kv_heads = x.k.shape[1]
    return t.unflatten(1, (kv_heads, x.q.shape[1] // max(kv_heads, 1))).sum(2)


class _Scores(NamedTuple):
    """biased: S (batch, heads, seqlen_q, seqlen_k). slope, curve: first and second derivative of s by raw."""

    biased: Tensor
    slope: Tensor | float
    curve: Tensor | float


def _scores(x: Inputs, o: Options) -> _Scores:
    s = o.scale * wide(x.q) @ _keys(x, x.k).mT
    slope: Tensor | float = 1.0
    curve: Tensor | float = 0.0
    if o.softcap > 0:
        t = torch.tanh(s / o.softcap)
        s, slope = o.softcap * t, 1 - t * t
        curve = -2 * t / o.softcap * slope
    if x.bias is not None:
        bias = bias_of_each(x.bias, len(x.q))
        s = s.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else s + bias
    seen = visible(x, o, slice(0, x.q.shape[2]), slice(0, x.k.shape[2]), x.kv_lens)
    return _Scores(s if seen is None else s.masked_fill(~seen, -torch.inf), slope, curve)


def _sink(x: Inputs) -> Tensor | None:
    return None if x.sinks is None else wide(x.sinks)[:, None]  # (heads, 1), beside lse


def _finite(lse: Tensor) -> Tensor:
    """lse with 0 where nothing is seen, so that exp(S - lse) is 0 and not NaN there."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _probabilities(x: Inputs, s: Tensor, lse: Tensor) -> tuple[Tensor, Tensor | float]:
    """P (batch, heads, seqlen_q, seqlen_k) and Psink (batch, heads, seqlen_q), 0.0 without sinks."""
    lse, sink = _finite(wide(lse)), _sink(x)
    p = torch.exp(s - lse[..., None])
    p_sink: Tensor | float = 0.0 if sink is None else torch.exp(sink - lse)
    total = p.sum(-1) + p_sink  # 1 but for the rounding of a large lse, and 0 where nothing is seen
    total = total.masked_fill(total == 0, 1.0)
    return p / total[..., None], p_sink / total


def _into(result: Tensor, value: Tensor) -> Tensor:
    return result.copy_(value)


def _bias_gradient(x: Inputs, ds: Tensor, bias_grad: bool) -> Tensor | None:
    """ds summed over the dimensions along which the bias was broadcast."""
    return _into(empty_like(x.bias), sum_to_bias(ds, x.bias)) if bias_grad and x.bias is not None else None


def _sink_gradient(x: Inputs, per_row: Tensor | float) -> Tensor | None:
    if x.sinks is None:
        return None
    assert isinstance(per_row, torch.Tensor)
    return _into(empty_like(x.sinks), per_row.sum((0, 2)))


# The four passes ---------------------------------------------------------------------------------------------------


@by_sequence("", "ol")
def forward(x: Inputs, o: Options) -> tuple[Tensor, Tensor]:
    """out (batch, heads, seqlen_q, head_dim_v) in q's dtype, lse (batch, heads, seqlen_q) in float32 or float64."""
    s = _scores(x, o).biased
    lse, sink = torch.logsumexp(s, -1), _sink(x)
    if sink is not None:
        lse = torch.logaddexp(lse, sink)
    p, _ = _probabilities(x, s, lse)
    return _into(empty_out(x.q, x.v), p @ _keys(x, x.v)), _into(empty_lse(x.q), lse)


@by_sequence("olol-", "qkv-s")
def backward(
    x: Inputs, o: Options, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """(dq, dk, dv, dbias, dsinks) from the cotangents dout of out and dlse of lse.

    dP = dO v^T; D = rowsum(dO O); delta = D - dlse; dS = P (dP - delta); draw = dS ds/draw.
    """
    scores = _scores(x, o)
    p, p_sink = _probabilities(x, scores.biased, lse)
    q, k, v, do = wide(x.q), _keys(x, x.k), _keys(x, x.v), wide(dout)
    delta = (do * wide(out)).sum(-1) - (0.0 if dlse is None else wide(dlse))
    ds = p * (do @ v.mT - delta[..., None])
    draw = ds * scores.slope
    return (
        _into(empty_like(x.q), o.scale * draw @ k),
        _into(empty_like(x.k), _grouped(x, o.scale * draw.mT @ q)),
        _into(empty_like(x.v), _grouped(x, p.mT @ do)),
        _bias_gradient(x, ds, bias_grad),
        _sink_gradient(x, -p_sink * delta),
    )


def _tangent(
    x: Inputs,
    o: Options,
    slope: Tensor | float,
    tq: Tensor | None,
    tk: Tensor | None,
    tbias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The tangents of raw and of S, (batch, heads, seqlen_q, seqlen_k), as q, k and bias move by tq, tk and tbias."""
    graw = wide(x.q).new_zeros(*x.q.shape[:3], x.k.shape[2])
    if tq is not None:
        graw = graw + o.scale * wide(tq) @ _keys(x, x.k).mT
    if tk is not None:
        graw = graw + o.scale * wide(x.q) @ _keys(x, tk).mT
    return graw, graw * slope + (0.0 if tbias is None else bias_of_each(wide(tbias), len(x.q)))


def _row_tangents(
    x: Inputs, p: Tensor, p_sink: Tensor | float, g_s: Tensor, out: Tensor, tv: Tensor | None, tsinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The tangents of out and lse, as S moves by g_s, v by tv, sinks by tsinks."""
    tlse = (p * g_s).sum(-1) + (0.0 if tsinks is None else p_sink * wide(tsinks)[:, None])
    tout = (p * g_s) @ _keys(x, x.v) - tlse[..., None] * wide(out)
    return tout if tv is None else tout + p @ _keys(x, tv), tlse


@by_sequence("ololqkv-s-", "qkv-sol")
def backward_backward(
    x: Inputs,
    o: Options,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    ddq: Tensor | None,
    ddk: Tensor | None,
    ddv: Tensor | None,
    ddbias: Tensor | None,
    ddsinks: Tensor | None,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
    """(dq2, dk2, dv2, dbias2, dsinks2, ddout, ddlse) from the cotangents ddq, ... of the results of `backward`.

    G = tangent of S along (ddq, ddk, ddbias); g = rowsum(P G) + Psink ddsink; ddO = P ddv + (P G) v - g O;
    u = rowsum(dO ddO); H = dO ddv^T; W = P (G - g); E = dS (G - g) + P (H - u); Eraw = E ds/draw + dS d2s/draw2 Graw.
    """
    scores = _scores(x, o)
    p, p_sink = _probabilities(x, scores.biased, lse)
    q, k, v, do = wide(x.q), _keys(x, x.k), _keys(x, x.v), wide(dout)
    delta = (do * wide(out)).sum(-1) - (0.0 if dlse is None else wide(dlse))
    ds = p * (do @ v.mT - delta[..., None])
    draw = ds * scores.slope
    graw, g_s = _tangent(x, o, scores.slope, ddq, ddk, ddbias)
    ddout, g = _row_tangents(x, p, p_sink, g_s, out, ddv, ddsinks)
    u = (do * ddout).sum(-1)
    h = 0.0 if ddv is None else do @ _keys(x, ddv).mT
    w = p * (g_s - g[..., None])
    e = ds * (g_s - g[..., None]) + p * (h - u[..., None])
    eraw = e * scores.slope + ds * scores.curve * graw
    dq2, dk2 = eraw @ k, eraw.mT @ q
    if ddk is not None:
        dq2 = dq2 + draw @ _keys(x, ddk)
    if ddq is not None:
        dk2 = dk2 + draw.mT @ wide(ddq)
    tsink = 0.0 if ddsinks is None else wide(ddsinks)[:, None]
    return (
        _into(empty_like(x.q), o.scale * dq2),
        _into(empty_like(x.k), _grouped(x, o.scale * dk2)),
        _into(empty_like(x.v), _grouped(x, w.mT @ do)),
        _bias_gradient(x, e, bias_grad),
        _sink_gradient(x, -p_sink * delta * (tsink - g) - p_sink * u),
        _into(empty_out(x.q, x.v), ddout),
        _into(empty_lse(x.q), g),
    )


@by_sequence("olqkv-s", "ol")
def jvp(
    x: Inputs,
    o: Options,
    out: Tensor,
    lse: Tensor,
    tq: Tensor | None,
    tk: Tensor | None,
    tv: Tensor | None,
    tbias: Tensor | None,
    tsinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(tout, tlse): how out and lse move as the inputs move by tq, tk, tv, tbias and tsinks."""
    scores = _scores(x, o)
    p, p_sink = _probabilities(x, scores.biased, lse)
    _, g_s = _tangent(x, o, scores.slope, tq, tk, tbias)
    tout, tlse = _row_tangents(x, p, p_sink, g_s, out, tv, tsinks)
    return _into(empty_out(x.q, x.v), tout), _into(empty_lse(x.q), tlse)


# What PyTorch does by itself ---------------------------------------------------------------------------------------


def attention(x: Inputs, o: Options) -> tuple[Tensor, Tensor]:
    """(out, lse) in plain differentiable operations: what PyTorch does in the same precision.

    Matrix products in the dtype of the inputs, softmax in float32 (float64 for float64), every derivative by autograd.
    Quadratic in memory; packed batches are looped over.
    """
    if x.cu_seqlens_q is not None:
        outs, lses = [x.q.new_empty(0, x.q.shape[1], x.v.shape[2])], [empty_lse(x.q[:0])]
        for rows, keys in spans(x):
            q, k, v = (t.transpose(0, 1)[None] for t in (x.q[rows], x.k[keys], x.v[keys]))
            out, lse = attention(Inputs(q, k, v, None, x.sinks), o)
            outs.append(out[0].transpose(0, 1))
            lses.append(lse[0])
        return torch.cat(outs), torch.cat(lses, -1)
    padding = _padding(x)
    k, v = (t if padding is None else t.masked_fill(padding, 0.0) for t in (x.k, x.v))
    group = x.q.shape[1] // max(k.shape[1], 1)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    s = wide(x.q @ k.mT) * o.scale
    if o.softcap > 0:
        s = o.softcap * torch.tanh(s / o.softcap)
    if x.bias is not None:
        bias = bias_of_each(x.bias, len(x.q))
        s = s.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else s + bias
    seen = visible(x, o, slice(0, x.q.shape[2]), slice(0, x.k.shape[2]), x.kv_lens)
    if seen is not None:
        s = s.masked_fill(~seen, -torch.inf)
    sink = None if x.sinks is None else wide(x.sinks)[:, None, None]
    # the shift is a constant: it cancels, so its derivatives do too; 0 where nothing is seen
    top = s.detach().amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:3], 1), -torch.inf)
    top = _finite(top if sink is None else torch.maximum(top, sink.detach()))
    e = torch.exp(s - top)
    total = e.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top)
    some = total > 0
    total = torch.where(some, total, 1.0)
    out = (e / total).to(x.q.dtype) @ v
    return out, torch.where(some, top + torch.log(total), -torch.inf).squeeze(-1)
