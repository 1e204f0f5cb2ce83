"""flash-attn 2.8's functions, run by adatom: code written for flash-attn works after changing one import.

    from adatom.compat.flash_attn import flash_attn_func  # was: from flash_attn import flash_attn_func

Names, argument order, defaults and layouts (batch, seqlen, heads, head_dim) are flash-attn's; tensors are passed as
views, never copied. What differs:

- Also float32 and float64, CPU tensors, v with its own head_dim, and second derivatives.
- `dropout_p > 0` and `block_table` (a paged cache) raise NotImplementedError.
- `alibi_slopes` is turned into a bias tensor (heads, seqlen_q, seqlen_k) in memory; the packed functions refuse it.
- `return_attn_probs=True` returns (out, softmax_lse, None): the probabilities, which flash-attn gives for its own tests
  only, are never made. softmax_lse of a query with nothing to attend to is -inf, where flash-attn gives +inf.

flash_attn_with_kvcache is not here.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch

from adatom.check import readable, require
from adatom.ops.attention.api import attention, attention_varlen

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention over a padded batch.

    Args:
        q: (batch, seqlen_q, heads, head_dim). k, v: (batch, seqlen_k, kv_heads, head_dim); kv_heads divides heads.
        dropout_p: must be 0.
        softmax_scale: default 1 / sqrt(head_dim).
        causal, window_size: aligned bottom-right: query i stands at key i + seqlen_k - seqlen_q; -1, or less, is
            unbounded.
        softcap: 0 is none.
        alibi_slopes: float (heads,) or (batch, heads): adds -slope * |i + seqlen_k - seqlen_q - j| to the scores.
            Differentiable, unlike flash-attn's.
        deterministic: use the fastest kernels whose results do not vary from run to run, backward included.
        return_attn_probs: also return lse, float32 (batch, heads, seqlen_q), and None.

    Returns:
        out (batch, seqlen_q, heads, head_dim), 0 where there is nothing to attend to; or (out, lse, None).
    """
    _refuse_dropout(dropout_p)
    require(_dims(q, k, v) == {4}, "4-D q, k and v (batch, seqlen, heads, head_dim)", q=q, k=k, v=v)
    result = attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        bias=None if alibi_slopes is None else _alibi(alibi_slopes, q, k),
        causal=causal,
        window=_window(window_size),
        softcap=softcap or None,
        scale=softmax_scale,
        return_lse=return_attn_probs,
        backend="deterministic" if deterministic else None,
    )
    if isinstance(result, tuple):
        return result[0].transpose(1, 2), result[1], None
    return result.transpose(1, 2)


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with k and v in one tensor kv (batch, seqlen_k, 2, kv_heads, head_dim)."""
    require(_dims(kv) == {5} and kv.shape[2] == 2, "kv of shape (batch, seqlen_k, 2, kv_heads, head_dim)", kv=kv)
    k, v = kv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with q, k and v in one tensor qkv (batch, seqlen, 3, heads, head_dim)."""
    require(_dims(qkv) == {5} and qkv.shape[2] == 3, "qkv of shape (batch, seqlen, 3, heads, head_dim)", qkv=qkv)
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Result:
    """Attention within each sequence of a packed batch.

    Args:
        q: (tokens_q, heads, head_dim). k, v: (tokens_k, kv_heads, head_dim).
        cu_seqlens_q, cu_seqlens_k: int32 (sequences + 1,): sequence i is tokens cu_seqlens[i] to cu_seqlens[i + 1]. For
            attention of tokens with themselves best one tensor twice, see `attention_varlen`.
        max_seqlen_q, max_seqlen_k: not needed here, may be None; on the CPU a maximum that is too small is refused.
        alibi_slopes, block_table: must be None.
        The rest as in `flash_attn_func`, alignment per sequence.

    Returns:
        out (tokens_q, heads, head_dim); or (out, lse, None), lse float32 (heads, tokens_q).
    """
    _refuse_dropout(dropout_p)
    require(
        block_table is None,
        "no block_table: a paged cache is not supported; gather its pages into k and v",
        NotImplementedError,
    )
    require(
        alibi_slopes is None,
        "no alibi_slopes for packed sequences, whose attention takes no bias; pad the batch and use flash_attn_func",
        NotImplementedError,
    )
    for name, cu_seqlens, most in (("q", cu_seqlens_q, max_seqlen_q), ("k", cu_seqlens_k, max_seqlen_k)):
        if most is not None and _dims(cu_seqlens) == {1} and readable(cu_seqlens) and len(cu_seqlens) > 1:
            longest = int(cu_seqlens.diff().max())
            require(longest <= most, f"max_seqlen_{name} of at least the longest sequence, {longest}", max_seqlen=most)
    result = attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal, window=_window(window_size), softcap=softcap or None,
        scale=softmax_scale, return_lse=return_attn_probs, backend="deterministic" if deterministic else None,
    )  # fmt: skip
    return (*result, None) if isinstance(result, tuple) else result


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` with k and v in one tensor kv (tokens_k, 2, kv_heads, head_dim)."""
    require(_dims(kv) == {4} and kv.shape[1] == 2, "kv of shape (tokens_k, 2, kv_heads, head_dim)", kv=kv)
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` with q, k and v in one tensor qkv (tokens, 3, heads, head_dim)."""
    require(_dims(qkv) == {4} and qkv.shape[1] == 3, "qkv of shape (tokens, 3, heads, head_dim)", qkv=qkv)
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def _dims(*tensors: torch.Tensor) -> set[int | None]:
    """How many dimensions these have; None for what is no tensor."""
    return {t.dim() if isinstance(t, torch.Tensor) else None for t in tensors}


def _window(window_size: tuple[int, int]) -> Any:
    """window_size with -1 for what is below: flash-attn takes any negative number as unbounded."""
    if not isinstance(window_size, (tuple, list)):
        return window_size
    return tuple(max(w, -1) if isinstance(w, Integral) else w for w in window_size)


def _refuse_dropout(dropout_p: float) -> None:
    require(
        not dropout_p,
        "dropout_p = 0: attention dropout is not implemented (flash-attn itself asks for 0 in evaluation)",
        NotImplementedError,
        dropout_p=dropout_p,
    )


def _alibi(slopes: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The bias -slope * |i + seqlen_k - seqlen_q - j|: (1 or batch, heads, seqlen_q, seqlen_k)."""
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k = k.shape[1]
    require(
        _dims(slopes) <= {1, 2}
        and slopes.shape[-1] == heads  # compilers of any length do not know `in`
        and (slopes.dim() == 1 or slopes.shape[0] == batch)
        and slopes.is_floating_point()
        and slopes.device == q.device,
        f"float alibi_slopes of shape ({heads},) or ({batch}, {heads}), on q's device",
        q=q,
        alibi_slopes=slopes,
    )
    at = torch.arange(seqlen_q, device=q.device)[:, None] + (seqlen_k - seqlen_q)
    distance = (at - torch.arange(seqlen_k, device=q.device)).abs()
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return slopes.to(dtype).view(-1, heads, 1, 1) * -distance.to(dtype)
