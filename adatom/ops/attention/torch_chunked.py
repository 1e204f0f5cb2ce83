"""Attention and its derivatives in PyTorch, in memory linear in length: the CPU path, and the fallback on any GPU.

Scores exist one tile at a time: some batches and heads, a block of query rows, and the keys those rows may see. The
formulas and their names are those of reference.py. Inside a tile the query heads that share a key head are folded into
the rows, so that grouped-query attention is one matrix product and needs no copy of k and v. On the CPU, plain calls
go to PyTorch's own flash attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from adatom.ops.attention.problem import Inputs, Options, empty_like, empty_lse, empty_out
from adatom.ops.attention.reference import by_sequence, visible, wide

Tensor = torch.Tensor

TILE = {"cpu": 1 << 20, "cuda": 1 << 25}  # scores in one tile: near the caches of a CPU, large enough for a GPU
ROWS = 128  # query rows of a tile, unless more fit
MIN_ROWS = 16  # never fewer, however long the keys: matrix products need some

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


# Plain calls on the CPU --------------------------------------------------------------------------------------------


def _mask(x: Inputs) -> Tensor | None:
    """The bias in the form PyTorch's flash attention takes: a float of q's dtype."""
    if x.bias is None or x.bias.dtype == x.q.dtype:
        return x.bias
    if x.bias.dtype == torch.bool:
        return torch.zeros_like(x.bias, dtype=x.q.dtype).masked_fill_(~x.bias, -torch.inf)
    return x.bias.to(x.q.dtype)


def _plain(x: Inputs, o: Options) -> bool:
    """Whether PyTorch's own CPU flash attention computes this call, without a converted copy of a full bias."""
    q, k, v, bias = x.q, x.k, x.v, x.bias
    if q.device.type != "cpu" or x.sinks is not None or x.kv_lens is not None or o.softcap > 0:
        return False
    if o.window_left >= 0 or o.window_right >= 0:
        return False
    if o.causal and q.shape[2] > 1 and (q.shape[2] != k.shape[2] or o.scale < 1e-30):  # it scales the -inf that hide
        return False
    if bias is not None and bias.dtype != q.dtype and (q.dtype != torch.float32 or bias.dtype != torch.bool):
        return False
    if bias is not None and bias.shape[0] not in (1, len(q)):
        return False
    if bias is not None and bias.dtype == torch.bool and bias.shape[2] > 1 and bias.shape[3] > 1:
        return False
    return q.shape[-1] == v.shape[-1] and q.numel() > 0 and k.numel() > 0


def _expanded(t: Tensor, heads: int) -> Tensor:
    return t if t.shape[1] == heads else t.repeat_interleave(heads // t.shape[1], dim=1)


def _foldable(x: Inputs, o: Options) -> bool:
    """Whether query heads that share a key head may be one longer head: rows do not know their position."""
    return not (o.causal and x.q.shape[2] > 1) and x.bias is None


def _fold(t: Tensor, kv_heads: int) -> Tensor:
    """(batch, heads, rows, dim) -> (batch, kv_heads, group * rows, dim)."""
    return t if t.shape[1] == kv_heads else t.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def _reshaped(result: Tensor, shape: torch.Size) -> Tensor:
    """`result` in another shape; no view to autograd, which would refuse to change a Function's view in place."""
    if result.shape == shape:
        return result
    try:
        return torch.ops.aten._unsafe_view(result, shape)
    except RuntimeError:  # its strides allow no view
        return result.reshape(shape)


def _stored(result: Tensor, like: Tensor) -> Tensor:
    """`result` with the shape and memory order of `like`: itself where it has them."""
    result = _reshaped(result, like.shape)
    return result if result.stride() == like.stride() else empty_like(like).copy_(result)


def _alone(mask: Tensor | None, *tensors: Tensor) -> tuple[Any, ...]:
    """These with each head as a batch element, where that takes no copy; else as they are.

    PyTorch's flash attention puts the heads of its results inside the length: those of a single head lie as q does.
    """
    if not all(t.is_contiguous() for t in tensors):
        return mask, *tensors
    if mask is not None:
        batch, heads = mask.shape[:2]
        if batch * heads not in (1, tensors[0].shape[0] * tensors[0].shape[1]):
            return mask, *tensors
        if batch > 1 and heads > 1 and mask.stride(0) != heads * mask.stride(1):
            return mask, *tensors
        mask = mask.flatten(0, 1)[:, None]
    return mask, *(t.flatten(0, 1)[:, None] for t in tensors)


def _hidden(mask: Tensor, causal: bool) -> Tensor:
    """(batch, heads, rows): whether a row of the mask is -inf, as far as a causal one lets it see."""
    if not causal or mask.shape[3] == 1:
        return mask.amax(-1) == -torch.inf
    hidden = mask == -torch.inf
    if mask.shape[2] == 1:
        return hidden[:, :, 0].cumprod(-1).bool()
    return ~hidden.logical_not_().tril_().any(-1)


def _plain_forward(x: Inputs, o: Options) -> tuple[Tensor, Tensor]:
    q, k, v = x.q, x.k, x.v
    if _foldable(x, o):
        q = _fold(q, k.shape[1])
    else:
        k, v = _expanded(k, q.shape[1]), _expanded(v, q.shape[1])
    mask, q, k, v = _alone(_mask(x), q, k, v)
    causal = o.causal and x.q.shape[2] > 1  # one query sees every key, however many heads are folded into rows
    result, result_lse = _flash(q, k, v, 0.0, causal, attn_mask=mask, scale=o.scale)
    if mask is not None:  # it gives 0 to a row that sees nothing
        result_lse.masked_fill_(_hidden(mask, causal), -torch.inf)
    return _stored(result, x.q), _reshaped(result_lse.contiguous(), x.q.shape[:3])


def _summed(grad: Tensor, like: Tensor) -> Tensor:
    """The gradient of keys that several heads share, given that of each of those."""
    grad = wide(grad).reshape(like.shape[0], like.shape[1], -1, *like.shape[2:])
    return grad.sum(2).to(like.dtype)


def _plain_backward(
    x: Inputs, o: Options, out: Tensor, lse: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = x.q, x.k, x.v
    if _foldable(x, o):
        q, out, dout = (_fold(t, k.shape[1]) for t in (q, out, dout))
    else:
        k, v = _expanded(k, q.shape[1]), _expanded(v, q.shape[1])
    mask, q, k, v, out, dout = _alone(_mask(x), q, k, v, out, dout)
    lse = lse.reshape(q.shape[:3])
    if mask is not None:
        lse = lse.masked_fill(lse == -torch.inf, 0.0)
    causal = o.causal and x.q.shape[2] > 1
    dq, *shared = _flash_backward(dout, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=o.scale)
    dk, dv = (
        _stored(grad if grad.numel() == t.numel() else _summed(grad, t), t) for grad, t in zip(shared, (x.k, x.v))
    )
    return _stored(dq, x.q), dk, dv


# Tiles -------------------------------------------------------------------------------------------------------------


def _cut(t: Tensor, *parts: slice) -> Tensor:
    """t[parts], keeping whole the dimensions of size 1 that broadcast."""
    return t[tuple(slice(None) if n == 1 else part for n, part in zip(t.shape, parts))]


class _Part:
    """Some batches and heads of a call: n = batches * kv_heads; group query heads share a key head.

    slices: those of the bias for these batches.

    Row tensors fold to (n, group * rows, dim), key tensors to (n, seqlen_k, dim), row values to (n, group * rows, 1).
    """

    def __init__(self, x: Inputs, o: Options, batches: slice, kv_heads: slice, lens: list[int] | None) -> None:
        self.x, self.o, self.batches, self.kv_heads = x, o, batches, kv_heads
        repeats = _repeats(x)
        self.slices = slice(batches.start // repeats, -(-batches.stop // repeats))
        self.group = x.q.shape[1] // x.k.shape[1]
        self.heads = slice(kv_heads.start * self.group, kv_heads.stop * self.group)
        self.shape = (batches.stop - batches.start, self.heads.stop - self.heads.start)
        self.n = self.shape[0] * (kv_heads.stop - kv_heads.start)
        self.kv_lens = None if x.kv_lens is None else x.kv_lens[batches]
        self.lens = None if lens is None else lens[batches]
        self.k, self.v = self.keys(x.k), self.keys(x.v)

    def keys(self, t: Tensor) -> Tensor:
        """t like k or v: (n, seqlen_k, dim), zeros beyond kv_lens."""
        t = wide(t[self.batches, self.kv_heads])
        if self.kv_lens is not None:
            beyond = torch.arange(t.shape[2], device=t.device) >= self.kv_lens[:, None]
            t = t.masked_fill(beyond[:, None, :, None], 0.0)
        return t.reshape(self.n, *t.shape[2:])

    def rows(self, t: Tensor, i: slice) -> Tensor:
        """t like q: (n, group * rows, dim)."""
        t = t[self.batches, self.heads, i]
        return wide(t).reshape(self.n, self.group * t.shape[2], t.shape[3])

    def values(self, t: Tensor, i: slice) -> Tensor:
        """t like lse: (n, group * rows, 1)."""
        return self.rows(t[..., None], i)

    def per_head(self, t: Tensor, i: slice) -> Tensor:
        """t like sinks: (n, group * rows, 1)."""
        t = wide(t)[None, self.heads, None, None].expand(self.shape[0], -1, i.stop - i.start, 1)
        return t.reshape(self.n, -1, 1)

    def put(self, result: Tensor, i: slice, value: Tensor) -> None:
        """Store folded rows into a result like q or lse."""
        target = result[self.batches, self.heads, i]
        target.copy_(value.reshape(target.shape))

    def put_keys(self, result: Tensor, value: Tensor) -> None:
        """Store folded keys into a result like k or v."""
        target = result[self.batches, self.kv_heads]
        target.copy_(value.view(target.shape))

    def full(self, t: Tensor) -> Tensor:
        """A tile (n, group * rows, keys) as (batches, heads, rows, keys)."""
        return t.view(*self.shape, t.shape[1] // self.group, t.shape[2])

    def reach(self, i: slice) -> slice:
        """The keys that some row of i may see."""
        seqlen_q, seqlen_k = self.x.q.shape[2], self.x.k.shape[2]
        low, high = (seqlen_k, seqlen_k) if self.kv_lens is None else (0, seqlen_k)
        if self.lens is not None:
            low, high = min(self.lens), max(self.lens)
        start, stop = 0, high
        if self.o.window_left >= 0:
            start = i.start + low - seqlen_q - self.o.window_left
        right = 0 if self.o.causal else self.o.window_right
        if right >= 0:
            stop = i.stop + high - seqlen_q + right
        stop = max(0, min(stop, high))
        return slice(max(0, min(start, stop)), stop)

    def hide(self, s: Tensor, i: slice, j: slice) -> None:
        """Fill with -inf, in s (batches, heads, rows, keys), what a row may not see."""
        edges = [j]
        if self.kv_lens is None:  # only the two edges of a band hide anything
            at, right = self.x.k.shape[2] - self.x.q.shape[2], 0 if self.o.causal else self.o.window_right
            left_end = i.stop - 1 + at - self.o.window_left if self.o.window_left >= 0 else j.start
            right_start = i.start + at + right + 1 if right >= 0 else j.stop
            left_end, right_start = (max(j.start, min(edge, j.stop)) for edge in (left_end, right_start))
            if left_end < right_start:
                edges = [slice(j.start, left_end), slice(right_start, j.stop)]
        for edge in edges:
            if edge.start < edge.stop:
                seen = visible(self.x, self.o, i, edge, self.kv_lens)
                if seen is not None:
                    s[..., edge.start - j.start : edge.stop - j.start].masked_fill_(~seen, -torch.inf)

    def scores(self, q: Tensor, i: slice, j: slice, curved: bool = False) -> tuple[Tensor, Tensor | None]:
        """S (n, group * rows, keys) of the scaled rows q; and, with a softcap and if `curved`, tanh(raw / softcap)."""
        s, t = torch.bmm(q, self.k[:, j].mT), None
        if self.o.softcap > 0:
            s.div_(self.o.softcap).tanh_()
            t = s.clone() if curved else None
            s.mul_(self.o.softcap)
        full = self.full(s)
        if self.x.bias is not None:
            bias = _cut(self.x.bias, self.slices, self.heads, i, j)
            if bias.dtype == torch.bool:
                full.masked_fill_(~bias, -torch.inf)
            else:
                full += bias
        self.hide(full, i, j)
        return s, t

    def probabilities(self, q: Tensor, lse: Tensor, i: slice, j: slice) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """P (n, group * rows, keys), Psink (n, group * rows, 1) if there are sinks, and tanh(raw / softcap)."""
        s, t = self.scores(q, i, j, curved=True)
        log = _finite(self.values(lse, i))
        p = s.sub_(log).exp_()
        total, p_sink = p.sum(-1, keepdim=True), None
        if self.x.sinks is not None:
            p_sink = torch.exp(self.per_head(self.x.sinks, i) - log)
            total += p_sink
        total.masked_fill_(total == 0, 1.0)  # else 1, but for the rounding of a large lse
        return p.div_(total), None if p_sink is None else p_sink.div_(total), t

    def add_bias(self, t: Tensor, bias: Tensor, i: slice, j: slice) -> None:
        """Add to a tile the part of a tensor like the bias."""
        self.full(t).add_(_cut(bias, self.slices, self.heads, i, j))


def _repeats(x: Inputs) -> int:
    """How many consecutive batch elements share a slice of the bias, where not all do."""
    return 1 if x.bias is None or x.bias.shape[0] in (1, x.q.shape[0]) else x.q.shape[0] // x.bias.shape[0]


def _split(total: int, step: int, start: int = 0) -> Iterator[slice]:
    for at in range(start, total, step):
        yield slice(at, min(at + step, total))


def _walk(x: Inputs, o: Options) -> Iterator[tuple[_Part, list[tuple[slice, slice]]]]:
    """The parts of a call, each with its blocks of query rows and the keys each block may see."""
    batch, heads, seqlen_q = x.q.shape[:3]
    kv_heads, seqlen_k = x.k.shape[1:3]
    if not batch or not kv_heads:
        return
    group = max(heads // kv_heads, 1)
    right = 0 if o.causal else o.window_right
    width = min(seqlen_k, o.window_left + right + 1 + ROWS) if min(o.window_left, right) >= 0 else seqlen_k
    width, tile = max(width, 1), TILE[x.q.device.type]
    fit = max(1, tile // (group * max(1, min(seqlen_q, ROWS)) * width))  # key heads in a tile
    step_heads = min(kv_heads, fit)
    step_batch = min(batch, max(1, fit // kv_heads))
    step_rows = max(MIN_ROWS, tile // (step_batch * step_heads * group * width))
    if width < seqlen_k:  # a window: more rows would bring more keys than that
        step_rows = min(step_rows, ROWS)
    lens = None
    if x.kv_lens is not None and x.kv_lens.device.type == "cpu":
        lens = x.kv_lens.clamp(0, seqlen_k).tolist()
    repeats = _repeats(x)
    spans = (slice(0, batch),) if repeats == 1 else _split(batch, repeats)  # a part has one slice of the bias, or all
    for batches in (part for span in spans for part in _split(span.stop, step_batch, span.start)):
        for some_heads in _split(kv_heads, step_heads):
            part = _Part(x, o, batches, some_heads, lens)
            yield part, [(i, part.reach(i)) for i in _split(seqlen_q if heads else 0, step_rows)]


class _BiasGradient:
    """Collects tiles of the gradient of the scores into that of the bias, summing where it was broadcast."""

    def __init__(self, x: Inputs, wanted: bool) -> None:
        self.bias = x.bias if wanted else None
        if self.bias is None:
            return
        self.once = self.bias.shape[:3] == x.q.shape[:3]  # every tile has an element of its own: no sum over tiles
        self.total = empty_like(self.bias) if self.once else torch.zeros_like(wide(self.bias))
        if self.once and self.bias.shape[3] == 1:
            self.total.zero_()

    def add(self, part: _Part, i: slice, j: slice, ds: Tensor) -> None:
        """ds: (n, group * rows, keys)."""
        if self.bias is None:
            return
        target = _cut(self.total, part.slices, part.heads, i, j)
        value = part.full(ds).sum_to_size(target.shape)
        if not self.once:
            target += value
            return
        target.copy_(value)
        if self.bias.shape[3] > 1:
            row = _cut(self.total, part.slices, part.heads, i, slice(None))
            row[..., : j.start].zero_()
            row[..., j.stop :].zero_()

    def result(self) -> Tensor | None:
        """dbias in the dtype of the bias."""
        if self.bias is None or self.total.dtype == self.bias.dtype:
            return None if self.bias is None else self.total
        return empty_like(self.bias).copy_(self.total)


class _SinkGradient:
    """Collects the gradient of the sinks from rows."""

    def __init__(self, x: Inputs) -> None:
        self.sinks = x.sinks
        self.total = None if x.sinks is None else torch.zeros_like(wide(x.sinks))

    def add(self, part: _Part, value: Tensor) -> None:
        """value: (n, group * rows, 1)."""
        if self.total is not None:
            self.total[part.heads] += value.view(*part.shape, -1).sum((0, 2))

    def result(self) -> Tensor | None:
        """dsinks in the dtype of the sinks."""
        return None if self.sinks is None or self.total is None else empty_like(self.sinks).copy_(self.total)


def _finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -torch.inf, 0.0)


# The four passes ---------------------------------------------------------------------------------------------------


@by_sequence("", "ol")
def forward(x: Inputs, o: Options) -> tuple[Tensor, Tensor]:
    """(out, lse) as reference.forward."""
    if _plain(x, o):
        return _plain_forward(x, o)
    out, lse = empty_out(x.q, x.v), empty_lse(x.q)
    for part, blocks in _walk(x, o):
        for i, j in blocks:
            s, _ = part.scores(part.rows(x.q, i) * o.scale, i, j)
            top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:2], 1), -torch.inf)
            sink = None if x.sinks is None else part.per_head(x.sinks, i)
            top = _finite(top if sink is None else torch.maximum(top, sink))
            s.sub_(top).exp_()
            total = s.sum(-1, keepdim=True)
            if sink is not None:
                total += torch.exp(sink - top)
            part.put(lse, i, total.log() + top)
            part.put(out, i, torch.bmm(s, part.v[:, j]) / total.masked_fill(total == 0, 1.0))
    return out, lse


@by_sequence("olol-", "qkv-s")
def backward(
    x: Inputs, o: Options, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """(dq, dk, dv, dbias, dsinks) as reference.backward."""
    if dlse is None and not bias_grad and _plain(x, o):
        return *_plain_backward(x, o, out, lse, dout), None, None
    dq, dk, dv = empty_like(x.q), empty_like(x.k), empty_like(x.v)
    dbias, dsinks = _BiasGradient(x, bias_grad), _SinkGradient(x)
    for part, blocks in _walk(x, o):
        sum_k, sum_v = torch.zeros_like(part.k), torch.zeros_like(part.v)
        for i, j in blocks:
            q, do = part.rows(x.q, i) * o.scale, part.rows(dout, i)
            delta = (do * part.rows(out, i)).sum(-1, keepdim=True)
            if dlse is not None:
                delta -= part.values(dlse, i)
            p, p_sink, t = part.probabilities(q, lse, i, j)
            sum_v[:, j].baddbmm_(p.mT, do)
            ds = torch.bmm(do, part.v[:, j].mT).sub_(delta).mul_(p)
            dbias.add(part, i, j, ds)
            if p_sink is not None:
                dsinks.add(part, -p_sink * delta)
            if t is not None:
                ds.mul_(t.square_().neg_().add_(1))
            part.put(dq, i, torch.bmm(ds, part.k[:, j]) * o.scale)
            sum_k[:, j].baddbmm_(ds.mT, q)
        part.put_keys(dk, sum_k)
        part.put_keys(dv, sum_v)
    return dq, dk, dv, dbias.result(), dsinks.result()


class _Moves:
    """How the inputs of one part move: the tangents of forward mode, or the cotangents of the first derivatives."""

    def __init__(self, part: _Part, tensors: tuple[Tensor | None, ...]) -> None:
        self.part = part
        self.q, k, v, self.bias, self.sinks = tensors
        self.k = None if k is None else part.keys(k)
        self.v = None if v is None else part.keys(v)

    def scores(self, q: Tensor, tq: Tensor | None, t: Tensor | None, i: slice, j: slice) -> tuple[Tensor, Tensor]:
        """The tangents of raw and of S, each (n, group * rows, keys), for scaled rows q and tq. May be one tensor."""
        part = self.part
        if tq is not None and self.k is not None:
            graw = torch.bmm(torch.cat((tq, q), -1), torch.cat((part.k[:, j], self.k[:, j]), -1).mT)
        elif tq is not None:
            graw = torch.bmm(tq, part.k[:, j].mT)
        elif self.k is not None:
            graw = torch.bmm(q, self.k[:, j].mT)
        else:
            graw = q.new_zeros(*q.shape[:2], j.stop - j.start)
        g = graw if t is None else graw * (1 - t * t)
        if self.bias is not None:
            part.add_bias(g, self.bias, i, j)
        return graw, g

    def rows(
        self, p: Tensor, pg: Tensor, p_sink: Tensor | None, o: Tensor, i: slice, j: slice
    ) -> tuple[Tensor, Tensor]:
        """The tangents of out and lse, from P, P G, Psink and out."""
        g = pg.sum(-1, keepdim=True)
        if self.sinks is not None and p_sink is not None:
            g += p_sink * self.part.per_head(self.sinks, i)
        tout = torch.bmm(pg, self.part.v[:, j]) - g * o
        if self.v is not None:
            tout.baddbmm_(p, self.v[:, j])
        return tout, g


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
    """(dq2, dk2, dv2, dbias2, dsinks2, ddout, ddlse) as reference.backward_backward."""
    dq, dk, dv = empty_like(x.q), empty_like(x.k), empty_like(x.v)
    ddout, ddlse = empty_out(x.q, x.v), empty_lse(x.q)
    dbias, dsinks = _BiasGradient(x, bias_grad), _SinkGradient(x)
    for part, blocks in _walk(x, o):
        moves = _Moves(part, (ddq, ddk, ddv, ddbias, ddsinks))
        sum_k, sum_v = torch.zeros_like(part.k), torch.zeros_like(part.v)
        for i, j in blocks:
            q, do = part.rows(x.q, i) * o.scale, part.rows(dout, i)
            tq = None if ddq is None else part.rows(ddq, i) * o.scale
            rows_out = part.rows(out, i)
            delta = (do * rows_out).sum(-1, keepdim=True)
            if dlse is not None:
                delta -= part.values(dlse, i)
            p, p_sink, t = part.probabilities(q, lse, i, j)
            graw, w = moves.scores(q, tq, t, i, j)
            w.mul_(p)
            tout, g = moves.rows(p, w, p_sink, rows_out, i, j)
            u = (do * tout).sum(-1, keepdim=True)
            part.put(ddout, i, tout)
            part.put(ddlse, i, g)
            w.addcmul_(p, g, value=-1)  # W = P (G - g)
            sum_v[:, j].baddbmm_(w.mT, do)
            ds = torch.bmm(do, part.v[:, j].mT).sub_(delta)
            e = w.mul_(ds)  # dS (G - g), then P (H - u)
            if moves.v is None:
                e.addcmul_(p, u, value=-1)
            else:
                e.addcmul_(p, torch.bmm(do, moves.v[:, j].mT).sub_(u))
            ds.mul_(p)
            dbias.add(part, i, j, e)
            if p_sink is not None:
                moved = -g if ddsinks is None else part.per_head(ddsinks, i) - g
                dsinks.add(part, -p_sink * (delta * moved + u))
            if t is not None:
                slope = 1 - t * t
                e = e.mul_(slope).add_(ds * slope * t * graw, alpha=-2 / o.softcap)
                ds.mul_(slope)
            rows_q = torch.bmm(e, part.k[:, j])
            sum_k[:, j].baddbmm_(e.mT, q)
            if moves.k is not None:
                rows_q.baddbmm_(ds, moves.k[:, j])
            if tq is not None:
                sum_k[:, j].baddbmm_(ds.mT, tq)
            part.put(dq, i, rows_q * o.scale)
        part.put_keys(dk, sum_k)
        part.put_keys(dv, sum_v)
    return dq, dk, dv, dbias.result(), dsinks.result(), ddout, ddlse


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
    """(tout, tlse) as reference.jvp."""
    tout, tlse = empty_out(x.q, x.v), empty_lse(x.q)
    for part, blocks in _walk(x, o):
        moves = _Moves(part, (tq, tk, tv, tbias, tsinks))
        for i, j in blocks:
            q = part.rows(x.q, i) * o.scale
            p, p_sink, t = part.probabilities(q, lse, i, j)
            _, g = moves.scores(q, None if tq is None else part.rows(tq, i) * o.scale, t, i, j)
            rows, values = moves.rows(p, g.mul_(p), p_sink, part.rows(out, i), i, j)
            part.put(tout, i, rows)
            part.put(tlse, i, values)
    return tout, tlse
