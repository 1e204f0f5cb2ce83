# mypy: ignore-errors
"""Which experts a token goes to, and with which weights, in one kernel, and the gradient in another (Triton).

A program is one warp with one token or a few: their logits stay in its registers, and top_k times it looks for the
largest. Numbers are compared as integers that order as they do, of which a warp finds the largest by one instruction
(redux.sync), and then the lowest place that has it.
"""

import torch
import triton
import triton.language as tl

from adatom.device import facts
from adatom.ops.route.problem import Options
from adatom.ops.route.reference import NONE
from adatom.tiles.launch import Launch
from adatom.tiles.triton import after_previous
from adatom.tiles.triton_dense import remembered

ELEMENTS = 256  # of a program's tile, where tokens are many

LOWEST = tl.constexpr(-(2**31))  # below the key of any number
LEAST_SCORE = tl.constexpr(torch.finfo(torch.float32).min)
TINY = tl.constexpr(NONE)


@triton.jit
def _key(x):
    """An int32 that orders as float32 x does: 0 and -0 are one, NaN is above all."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _number(key):
    """The float32 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _first(key, best, place, AXIS: tl.constexpr):
    """The lowest place of a key equal to `best`."""
    return tl.min(tl.where(key == tl.expand_dims(best, AXIS), place, 0x7FFFFFFF), AXIS)


@triton.jit
def _within_groups(key, GROUPS: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr):
    """key [ROWS, experts], LOWEST outside the KEPT groups of which the BEST largest numbers have the largest sum."""
    ROWS: tl.constexpr = key.shape[0]
    SIZE: tl.constexpr = key.shape[1] // GROUPS
    apart = tl.reshape(key, [ROWS, GROUPS, SIZE])
    left = apart
    place = tl.arange(0, SIZE)[None, None, :]
    sums = tl.zeros([ROWS, GROUPS], tl.float32)
    for n in tl.static_range(BEST if BEST < SIZE else SIZE):
        best = tl.max(left, 2)
        sums += _number(best)
        if n + 1 < (BEST if BEST < SIZE else SIZE):
            left = tl.where(place == _first(left, best, place, 2)[:, :, None], LOWEST, left)
    group = tl.arange(0, GROUPS)[None, :]
    order = _key(sums)
    kept = order < LOWEST
    for _ in range(KEPT):
        found = group == _first(order, tl.max(order, 1), group, 1)[:, None]
        kept |= found
        order = tl.where(found, LOWEST, order)
    return tl.reshape(tl.where(kept[:, :, None], apart, LOWEST), [ROWS, GROUPS * SIZE])


@triton.jit
def _exponentials(x, there):
    """exp(x - the largest x of the row), its sum over the row, that largest: the sum is NaN if an x is NaN or +inf, or
    all are -inf. 0 where there is no x."""
    peak = tl.max(tl.where(there, x, float("-inf")), 1)
    found = tl.where(there, tl.exp(x - peak[:, None]), 0.0)
    return found, tl.sum(found, 1), peak


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _softmax_of_chosen(logits, m):
    """The softmax of each row where m."""
    w = tl.where(m, tl.exp(logits - tl.max(logits, 1)[:, None]), 0.0)
    return w / tl.sum(w, 1)[:, None]


@triton.jit
def _tile(Logits, tokens, stride_t, stride_e, EXPERTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """This program's tokens [ROWS], experts [1, BLOCK], which of them exist, and where their logits are."""
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    e = tl.arange(0, BLOCK)[None, :]
    return t, e, e < EXPERTS, Logits + t[:, None] * stride_t + e.to(tl.int64) * stride_e


@triton.jit
def _fwd_kernel(Logits, Bias, Weights, Indices, tokens, stride_t, stride_e, scale, EARLY: tl.constexpr, EXPERTS:
                tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, BIASED:
                tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr, ROWS: tl.constexpr,
                BLOCK: tl.constexpr, SLOTS: tl.constexpr):
    """Weights and Indices (tokens, TOP_K) of ROWS tokens; the formulas are in reference.py."""
    BY_LOGITS: tl.constexpr = not BIASED and GROUPS == 0
    after_previous(EARLY)
    t, e, there, at = _tile(Logits, tokens, stride_t, stride_e, EXPERTS, ROWS, BLOCK)
    x = tl.load(at, mask=(t < tokens)[:, None] & there, other=0.0).to(tl.float32)
    choice = x
    if not SIGMOID and not (BY_LOGITS and RENORMALIZE):
        scores, total, peak = _exponentials(x, there)
        if not BY_LOGITS:
            choice = scores / total[:, None]
    elif not BY_LOGITS:
        choice = _sigmoid(x)
    if BIASED:
        choice += tl.load(Bias + e, mask=there, other=0.0)
    if GROUPS:
        LEAST: tl.constexpr = LEAST_SCORE / (EXPERTS // GROUPS)
        choice = tl.where(choice < LEAST, LEAST, choice)
    key = tl.where(there, _key(choice), LOWEST)
    if GROUPS:
        key = _within_groups(key, GROUPS, KEPT, BEST)
    slot = tl.arange(0, SLOTS)[None, :]
    indices = tl.zeros([ROWS, SLOTS], tl.int32)
    logits = tl.full([ROWS, SLOTS], float("-inf"), tl.float32)
    for k in range(TOP_K):
        best = tl.max(key, 1)
        index = _first(key, best, e, 1)
        here = e == index[:, None]
        logit = _number(best) if BY_LOGITS else tl.sum(tl.where(here, x, 0.0), 1)
        key = tl.where(here, LOWEST, key)
        indices = tl.where(slot == k, index[:, None], indices)
        logits = tl.where(slot == k, logit[:, None], logits)
    if SIGMOID:
        w = tl.where(slot < TOP_K, _sigmoid(logits), 0.0)
        if RENORMALIZE:
            w /= (tl.sum(w, 1) + TINY)[:, None]
    elif RENORMALIZE:
        w = _softmax_of_chosen(logits, slot < TOP_K)
        if not BY_LOGITS:
            w = tl.where((total != total)[:, None], float("nan"), w)
    else:
        w = tl.exp(logits - peak[:, None]) / total[:, None]
    to = t[:, None] * TOP_K + slot
    m = (t < tokens)[:, None] & (slot < TOP_K)
    tl.store(Weights + to, w * scale, mask=m)
    tl.store(Indices + to, indices.to(tl.int64), mask=m)


@triton.jit
def _bwd_kernel(Logits, Indices, DWeights, DLogits, tokens, stride_t, stride_e, stride_dt, stride_dk, scale, EARLY:
                tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE:
                tl.constexpr, BY_LOGITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr):
    """DLogits (tokens, EXPERTS) of ROWS tokens; the formulas are in reference.py."""
    after_previous(EARLY)
    t, e, there, at = _tile(Logits, tokens, stride_t, stride_e, EXPERTS, ROWS, BLOCK)
    slot = tl.arange(0, SLOTS)[None, :]
    m = (t < tokens)[:, None] & (slot < TOP_K)
    index = tl.load(Indices + t[:, None] * TOP_K + slot, mask=m, other=0)
    dw = tl.load(DWeights + t[:, None] * stride_dt + slot.to(tl.int64) * stride_dk, mask=m, other=0.0) * scale
    logits = tl.load(Logits + t[:, None] * stride_t + index * stride_e, mask=m, other=float("-inf")).to(tl.float32)
    index = index.to(tl.int32)
    dx = tl.zeros([ROWS, BLOCK], tl.float32)
    if not SIGMOID and not (BY_LOGITS and RENORMALIZE):
        x = tl.load(at, mask=(t < tokens)[:, None] & there, other=0.0).to(tl.float32)
        scores, total, peak = _exponentials(x, there)
    if SIGMOID:
        s = tl.where(slot < TOP_K, _sigmoid(logits), 0.0)
        if RENORMALIZE:
            sum = (tl.sum(s, 1) + TINY)[:, None]
            dw = (dw - tl.sum(s / sum * dw, 1)[:, None]) / sum
        d = s * (1.0 - s) * dw
    elif RENORMALIZE:
        w = _softmax_of_chosen(logits, slot < TOP_K)
        if not BY_LOGITS:
            w = tl.where((total != total)[:, None], float("nan"), w)
        d = w * (dw - tl.sum(w * dw, 1)[:, None])
    else:
        w = tl.exp(logits - peak[:, None]) / total[:, None]
        dot = tl.sum(tl.where(slot < TOP_K, w * dw, 0.0), 1)[:, None]
        d = w * (dw - dot)
        dx -= scores / total[:, None] * dot
    for k in range(TOP_K):
        here = e == tl.sum(tl.where(slot == k, index, 0), 1)[:, None]
        dx = tl.where(here, tl.sum(tl.where(slot == k, d, 0.0), 1)[:, None], dx)
    tl.store(DLogits + t[:, None] * EXPERTS + e, dx.to(DLogits.dtype.element_ty), mask=(t < tokens)[:, None] & there)


def _launch(kernel, logits, o: Options, scalars, **more):
    """The launch of a kernel for these logits: one warp for a tile of ELEMENTS, or for one token."""
    (tokens, experts), device = logits.shape, facts(logits.device)
    block, slots = triton.next_power_of_2(experts), triton.next_power_of_2(o.top_k)
    many = max(1, tokens // max(1, 8 * device.sms))  # so that each multiprocessor has eight programs, or more
    rows = min(max(1, ELEMENTS // block), 1 << (many.bit_length() - 1))
    early = device.arch >= 90
    meta = dict(
        EARLY=early, EXPERTS=experts, TOP_K=o.top_k, SIGMOID=o.scoring == "sigmoid", RENORMALIZE=o.renormalize,
        ROWS=rows, BLOCK=block, SLOTS=slots, num_warps=1,
    )
    scalars = (tokens, *logits.stride(), *scalars, o.scale)
    return Launch(kernel, -(-tokens // rows), scalars, meta | more | ({"launch_pdl": True} if early else {}))


def _forward(tensors, o: Options):
    groups, kept, best = o.groups
    return _launch(_fwd_kernel, tensors[0], o, (), BIASED=o.biased, GROUPS=groups, KEPT=kept, BEST=best)


def forward(logits: torch.Tensor, selection_bias: torch.Tensor | None, o: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, indices); the contract is in reference.py."""
    shape = logits.shape[0], o.top_k
    weights, indices = logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)
    bias = None if selection_bias is None else selection_bias.contiguous()  # a copy only of strided ones
    tensors = (logits, bias, weights, indices)
    remembered(_forward, tensors, o)(*tensors)
    return weights, indices


def _backward(tensors, o: Options):
    logits, _, dweights, _ = tensors
    return _launch(_bwd_kernel, logits, o, dweights.stride(), BY_LOGITS=o.by_logits)


def backward(logits: torch.Tensor, indices: torch.Tensor, dweights: torch.Tensor, o: Options) -> tuple[torch.Tensor]:
    """(dlogits,); the contract is in reference.py."""
    dlogits = logits.new_empty(logits.shape)
    tensors = (logits, indices.contiguous(), dweights, dlogits)
    remembered(_backward, tensors, o)(*tensors)
    return (dlogits,)
