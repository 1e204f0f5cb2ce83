"""The other implementations of attention that adatom is timed against, each optional.

A rival binds a case to a function of (q, k, v, bias) that computes what `adatom.attention` would, in adatom's layout
(views, no copies).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from adatom.bench.rivals import Bind, Call, Rival, Unfit
from adatom.ops.attention.cases import Case

Tensor = torch.Tensor

TENSORS = ("q", "k", "v", "bias")
THREE_ORDERS = ("second", "neighbours")  # groups in which forward, backward and double backward are timed


def passes(group: str, case: Case) -> tuple[str, ...]:
    """What is timed: all three orders in THREE_ORDERS, forwards without and with tangents in group "jvp", the forward
    alone for decoding and single queries, else both passes."""
    if group in THREE_ORDERS:
        return ("forward", "backward", "double backward")
    if group == "jvp":
        return ("forward", "forward mode")
    return ("forward",) if case.seqlen_q == 1 or group == "decode" else ("forward", "backward")


def _refuse(case: Case, **does: bool) -> None:
    """Raise Unfit for the first option of `case` that is not in `does`."""
    asked = {
        "bias": bool(case.bias),
        "window": case.window is not None,
        "softcap": case.softcap is not None,
        "sinks": case.sinks,
        "kv_lens": case.kv_lens,
        "varlen": case.varlen,
        "float32": case.dtype in (torch.float32, torch.float64),
        "head_dim_v": case.head_dim_v != case.head_dim,
        "gqa": case.kv_heads != case.heads,
    }
    for option, wanted in asked.items():
        if wanted and not does.get(option, False):
            raise Unfit(f"no {option.replace('_', ' ')}")


def _needs_gpu(given: dict[str, Any]) -> None:
    if given["q"].device.type != "cuda":
        raise Unfit("needs a GPU")


def _scale(case: Case) -> float:
    return case.head_dim**-0.5 if case.scale is None else case.scale


def _additive(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return bias if bias is None or bias.dtype == torch.bool else bias.to(dtype)


# PyTorch -----------------------------------------------------------------------------------------------------------


def _sdpa(backend: SDPBackend | None) -> Bind:
    def bind(case: Case, given: dict[str, Any]) -> Call:
        _refuse(case, bias=True, float32=True, head_dim_v=True, gqa=True)
        if case.causal and (case.bias or case.seqlen_q not in (1, case.seqlen_k)):
            raise Unfit("causal only without a bias and with equal lengths")
        if backend in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            _needs_gpu(given)
        options: dict[str, Any] = {"is_causal": case.causal and case.seqlen_q > 1, "scale": _scale(case)}
        groups = case.heads // case.kv_heads

        def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
            mask = _additive(bias, q.dtype)
            if groups > 1 and backend == SDPBackend.EFFICIENT_ATTENTION:  # it has no grouped heads
                k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
            with nullcontext() if backend is None else sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=k.shape[1] != q.shape[1], **options)

        return call

    return bind


def dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, case: Case, kv_lens: Tensor | None = None) -> Tensor:
    """softmax(q k^T * scale + bias) v, as one writes it by hand: a (queries, keys) tensor for each step."""
    groups = case.heads // case.kv_heads
    if groups > 1:
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * _scale(case)
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    if bias is not None:
        scores = scores.masked_fill(~bias, float("-inf")) if bias.dtype == torch.bool else scores + bias.to(q.dtype)
    if case.causal or case.window is not None or kv_lens is not None:
        hidden = ~_seen(case, kv_lens, q.device)
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.softmax(scores, -1) @ v


def _seen(case: Case, kv_lens: Tensor | None, device: torch.device) -> Tensor:
    i = torch.arange(case.seqlen_q, device=device)[:, None]
    j = torch.arange(case.seqlen_k, device=device)
    lens: Any = case.seqlen_k if kv_lens is None else kv_lens[:, None, None, None]
    at = i + lens - case.seqlen_q
    seen = j < lens
    left, right = case.window or (None, None)
    if case.causal:
        seen = seen & (j <= at)
    if left not in (None, -1):
        seen = seen & (j >= at - left)
    if right not in (None, -1):
        seen = seen & (j <= at + right)
    return seen


def _dense(case: Case, given: dict[str, Any]) -> Call:
    _refuse(case, bias=True, window=True, softcap=True, kv_lens=True, float32=True, head_dim_v=True, gqa=True)

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        return dense(q, k, v, bias, case, given.get("kv_lens"))

    return call


@lru_cache(maxsize=1)
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _flex(case: Case, given: dict[str, Any]) -> Call:
    _refuse(case, bias=True, window=True, softcap=True, kv_lens=True, float32=True, head_dim_v=True, gqa=True)
    _needs_gpu(given)
    from torch.nn.attention.flex_attention import create_block_mask

    torch.compiler.reset()  # or the 8 variants that one function may have run out
    lens = given.get("kv_lens")
    left, right = (None if w in (None, -1) else w for w in case.window or (None, None))
    shift = case.seqlen_k - case.seqlen_q
    wide = tuple(int(n != 1) for n in case.bias_shape or ())

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        at = i + (shift if lens is None else lens[b] - case.seqlen_q)
        out = (j >= 0) if lens is None else (j < lens[b])
        if case.causal:
            out = out & (j <= at)
        if left is not None:
            out = out & (j >= at - left)
        if right is not None:
            out = out & (j <= at + right)
        return out

    blocks = None
    if case.causal or case.window is not None or lens is not None:
        sizes = (None if lens is None else case.batch, None, case.seqlen_q, case.seqlen_k)
        blocks = create_block_mask(seen, *sizes, device=str(given["q"].device))
    flex = _compiled_flex()

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if case.softcap:
                s = case.softcap * torch.tanh(s / case.softcap)
            if bias is None:
                return s
            b, h, i, j = (x * w for x, w in zip((b, h, i, j), wide))  # index 0 where the bias broadcasts
            if bias.dtype == torch.bool:
                return torch.where(bias[b, h, i, j], s, -float("inf"))
            return s + bias[b, h, i, j]

        change = score if case.softcap or bias is not None else None
        grouped = case.heads != case.kv_heads
        return flex(q, k, v, score_mod=change, block_mask=blocks, scale=_scale(case), enable_gqa=grouped)

    return call


def _torch_varlen(case: Case, given: dict[str, Any]) -> Call:
    """`torch.nn.attention.varlen.varlen_attn`, FlashAttention-2: packed sequences; whole batches, for their windows."""
    _needs_gpu(given)
    attend = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    _refuse(case, window=True, varlen=True, gqa="enable_gqa" in inspect.signature(attend).parameters)
    left, right = case.window or (None, None)
    window = (-1 if left is None else left, 0 if case.causal else -1 if right is None else right)
    options: dict[str, Any] = {"scale": _scale(case), "window_size": window}
    if case.heads != case.kv_heads:
        options["enable_gqa"] = True
    most = case.seqlen_q, case.seqlen_k
    first = torch.arange(case.batch + 1, device=given["q"].device, dtype=torch.int32)
    ends = [given.get(f"cu_seqlens_{name}", first * n) for name, n in zip("qk", most)]

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        if not case.varlen:
            q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        out: Tensor = attend(q, k, v, *ends, *most, **options)
        return out if case.varlen else out.unflatten(0, (case.batch, case.seqlen_q)).transpose(1, 2)

    return call


# FlashAttention ----------------------------------------------------------------------------------------------------


def _flash_attn(module: str, unbounded: int | None, sinks: bool = False) -> Bind:
    """The flash-attn family: (batch, length, heads, dim), packed (tokens, heads, dim). `unbounded`: an open window."""

    def bind(case: Case, given: dict[str, Any]) -> Call:
        _refuse(case, window=True, softcap=True, varlen=True, gqa=True, sinks=sinks)
        _needs_gpu(given)
        flash = importlib.import_module(module)
        options: dict[str, Any] = {"causal": case.causal, "softmax_scale": _scale(case)}
        if case.window is not None:
            options["window_size"] = tuple(unbounded if w in (None, -1) else w for w in case.window)
        if case.softcap is not None:
            options["softcap"] = case.softcap
        if case.sinks:
            options["learnable_sink"] = given["sinks"]
        if case.varlen:
            options |= {"cu_seqlens_q": given["cu_seqlens_q"], "cu_seqlens_k": given["cu_seqlens_k"]}
            options |= {"max_seqlen_q": case.seqlen_q, "max_seqlen_k": case.seqlen_k}

        def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
            if case.varlen:
                out = flash.flash_attn_varlen_func(q, k, v, **options)
            else:
                out = flash.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), **options)
            out = out[0] if isinstance(out, tuple) else out
            return out if case.varlen else out.transpose(1, 2)

        return call

    return bind


def _flash_cache(case: Case, given: dict[str, Any]) -> Call:
    """FlashAttention-3's function for decoding, which splits keys over programs."""
    _refuse(case, window=True, softcap=True, gqa=True, kv_lens=True)
    _needs_gpu(given)
    flash = importlib.import_module("flash_attn_interface")
    whole = torch.full((case.batch,), case.seqlen_k, dtype=torch.int32, device=given["q"].device)
    options: dict[str, Any] = {"causal": case.causal, "softmax_scale": _scale(case), "softcap": case.softcap or 0.0}
    options |= {"cache_seqlens": given.get("kv_lens", whole)}
    if case.window is not None:
        options["window_size"] = tuple(-1 if w is None else w for w in case.window)

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        out: Tensor = flash.flash_attn_with_kvcache(*(x.transpose(1, 2) for x in (q, k, v)), **options)
        return out.transpose(1, 2)

    return call


# xformers, cuEquivariance ------------------------------------------------------------------------------------------


def _xformers(case: Case, given: dict[str, Any]) -> Call:
    _refuse(case, bias=True, float32=True, head_dim_v=True, gqa=True)
    _needs_gpu(given)
    if case.causal and case.bias:
        raise Unfit("no causal mask with a bias")
    ops = importlib.import_module("xformers.ops")
    causal = ops.fmha.attn_bias.LowerTriangularFromBottomRightMask() if case.causal else None
    groups = case.heads // case.kv_heads
    scores = (case.batch, case.heads, case.seqlen_q, case.seqlen_k)

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if groups > 1:  # (batch, length, kv heads, groups, dim)
            q = q.unflatten(2, (case.kv_heads, groups))
            k, v = (x[:, :, :, None].expand(-1, -1, -1, groups, -1) for x in (k, v))
        mask = causal if bias is None else bias.to(q.dtype).expand(scores)
        out = ops.memory_efficient_attention(q, k, v, attn_bias=mask, scale=_scale(case))
        return (out.flatten(2, 3) if groups > 1 else out).transpose(1, 2)

    return call


def _cuequivariance(case: Case, given: dict[str, Any]) -> Call:
    _refuse(case, bias=True, float32=True)
    _needs_gpu(given)
    if case.bias[:4] != "1hqk" or case.causal:
        raise Unfit("triangle attention: a bias (1, heads, queries, keys) and no causal mask")
    triangle = importlib.import_module("cuequivariance_torch").triangle_attention

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return triangle(q[None], k[None], v[None], bias.float()[None], scale=_scale(case))[0]

    return call


# jvp_flash_attention -----------------------------------------------------------------------------------------------


def _jvp_flash(case: Case, given: dict[str, Any]) -> Call:
    _refuse(case, float32=True)
    _needs_gpu(given)
    if case.causal and case.seqlen_q != case.seqlen_k:
        raise Unfit("causal only with equal lengths")
    module = importlib.import_module("jvp_flash_attention.jvp_attention")
    options = {"causal": case.causal, "sm_scale": _scale(case)}

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        with_tangents = forward_ad.unpack_dual(q).tangent is not None
        out: Tensor = (module.JVPAttn.fwd_dual if with_tangents else module.attention)(q, k, v, **options)
        return out

    return call


# The list ----------------------------------------------------------------------------------------------------------


def _everywhere(case: Case, group: str) -> bool:
    return group != "jvp"


def _quadratic(case: Case, group: str) -> bool:
    """Where a quadratic implementation is what one would otherwise use: second derivatives, forward mode, learned
    biases."""
    return group in (*THREE_ORDERS, "jvp", "bias", "pair bias", "triangle")


def _beyond_flash(case: Case, group: str) -> bool:
    """Where FlashAttention cannot go; elsewhere the seconds that compilation takes buy nothing."""
    return bool(case.bias or case.softcap or case.window or case.kv_lens) and group not in (*THREE_ORDERS, "jvp")


RIVALS: tuple[Rival, ...] = (
    Rival("sdpa_flash", (), _sdpa(SDPBackend.FLASH_ATTENTION), _everywhere),
    Rival("sdpa_cudnn", (), _sdpa(SDPBackend.CUDNN_ATTENTION), _everywhere),
    Rival("sdpa_efficient", (), _sdpa(SDPBackend.EFFICIENT_ATTENTION), _everywhere),
    Rival("sdpa_math", (), _sdpa(SDPBackend.MATH), _quadratic),
    Rival("dense", (), _dense, _quadratic),
    Rival("flex_attention", (), _flex, _beyond_flash),
    Rival("varlen_attn", (), _torch_varlen, lambda case, group: case.varlen or case.window is not None),
    Rival("flash_attn_2", ("flash-attn",), _flash_attn("flash_attn", -1), _everywhere),
    Rival(
        "flash_attn_3",
        ("flash-attn-3", "tokenspeed-fa3"),
        _flash_attn("flash_attn_interface", -1),
        _everywhere,
    ),
    Rival(
        "flash_attn_3_cache", ("flash-attn-3", "tokenspeed-fa3"), _flash_cache, lambda case, group: group == "decode"
    ),
    Rival("flash_attn_4", ("flash-attn-4",), _flash_attn("flash_attn.cute", None, True), _everywhere),
    Rival("xformers", ("xformers",), _xformers, _everywhere),
    Rival("jvp_flash_attention", ("jvp-flash-attention",), _jvp_flash, lambda case, group: group == "jvp"),
    Rival("cuequivariance", ("cuequivariance-torch",), _cuequivariance, _everywhere),
)
