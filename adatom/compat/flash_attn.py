"""flash-attn 2.8's functions, run by adatom: code written for flash-attn works after changing one import.

    from adatom.compat.flash_attn import flash_attn_func  # was: from flash_attn import flash_attn_func

Names, argument order, defaults and layouts (batch, seqlen, heads, head_dim) are flash-attn's; tensors are passed as
views, never copied. What differs:

- Also float32 and float64, CPU tensors, v with its own head_dim, and second derivatives.
- `dropout_p > 0`, `block_table` (a paged cache), `cache_batch_idx` and `cache_leftpad` raise NotImplementedError.
- `alibi_slopes` is turned into a bias tensor (heads, seqlen_q, seqlen_k) in memory; the packed functions refuse it.
- `return_attn_probs=True` returns (out, softmax_lse, None): the probabilities, which flash-attn gives for its own tests
  only, are never made. softmax_lse of a query with nothing to attend to is -inf, where flash-attn gives +inf.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch

from adatom.check import readable, require, supplied, whole
from adatom.ops.attention.api import attention, attention_varlen, inputs_of

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


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention to a cache of keys, to which new ones are first added in place.

    Args:
        q: (batch, seqlen_q, heads, head_dim). k_cache, v_cache: (batch, most, kv_heads, head_dim).
        k, v: (batch, seqlen_new, kv_heads, head_dim): written into the caches behind the keys that are there, which
            must leave room (on a GPU, unchecked: the caller's duty). Want cache_seqlens.
        rotary_cos, rotary_sin: (at least the positions, rotary_dim / 2): the first rotary_dim features of k, and of q,
            are turned as those of their positions, from cache_seqlens on; all of q as of position cache_seqlens where
            there is neither a causal mask nor a window. Want k. rotary_interleaved: features 0 and 1, 2 and 3, ... are
            turned together; else those of the first half and of the second.
        cache_seqlens: keys that are there, an integer or integers (batch,) on q's device; default: all.
        cache_batch_idx, cache_leftpad, block_table: must be None.
        num_splits: ignored: adatom splits keys where that is faster.
        return_softmax_lse: also return lse, float32 (batch, heads, seqlen_q).
        The others: as in `flash_attn_func`; what is aligned ends at the last key of each sequence, the new included.

    Returns:
        out (batch, seqlen_q, heads, head_dim), 0 where there is nothing to attend to; or (out, lse).
    """
    for name, given in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
        require(given is None, f"no {name}: not implemented", NotImplementedError)
    require(block_table is None, "no block_table: paged caches are not implemented", NotImplementedError)
    shapes = {"q": q, "k_cache": k_cache, "v_cache": v_cache} | supplied(k=k, v=v)
    require(_dims(*shapes.values()) == {4}, "4-D tensors (batch, seqlen, heads, head_dim)", **shapes)
    require((k is None) == (v is None), "k and v, or neither", **shapes)
    lens = _lengths(cache_seqlens, q)
    require(k is None or lens is not None, "cache_seqlens, where k and v go", **shapes)
    turned = rotary_cos is not None or rotary_sin is not None
    require(not turned or k is not None, "rotary_cos and rotary_sin only with k and v, which they turn")
    if k is not None and v is not None and lens is not None:
        fits = (
            k.shape[1] == v.shape[1]
            and k.shape[0] == q.shape[0]
            and all(
                (a.shape[0], *a.shape[2:], a.dtype, a.device) == (b.shape[0], *b.shape[2:], b.dtype, b.device)
                for a, b in ((k, k_cache), (v, v_cache))
            )
        )
        require(fits, "k and v of q's batch and like their caches, but for the length", **shapes)
        at = lens.long()[:, None] + torch.arange(k.shape[1], device=q.device)
        if turned:
            steps = torch.arange(q.shape[1], device=q.device) * int(causal or _window(window_size) != (-1, -1))
            tables = rotary_cos, rotary_sin, rotary_interleaved
            q, k = _rotate(q, lens.long()[:, None] + steps, *tables), _rotate(k, at, *tables)
        lens = lens + k.shape[1]
        fits = not readable(lens) or bool(((lens >= k.shape[1]) & (lens <= k_cache.shape[1])).all())
        require(fits, "room for the new keys behind cache_seqlens", cache_seqlens=cache_seqlens, **shapes)
    arguments: dict[str, Any] = {
        "q": q.transpose(1, 2), "k": k_cache.transpose(1, 2), "v": v_cache.transpose(1, 2), "kv_lens": lens,
        "bias": None if alibi_slopes is None else _alibi(alibi_slopes, q, k_cache, lens), "causal": causal,
        "window": _window(window_size), "softcap": softcap or None, "scale": softmax_scale,
    }  # fmt: skip
    if k is not None and v is not None:
        inputs_of(**arguments)  # what it refuses leaves the caches as they are
        rows = torch.arange(q.shape[0], device=q.device)[:, None]
        k_cache[rows, at], v_cache[rows, at] = k, v
    result = attention(**arguments, return_lse=return_softmax_lse)
    return (result[0].transpose(1, 2), result[1]) if isinstance(result, tuple) else result.transpose(1, 2)


def _lengths(given: Any, q: torch.Tensor) -> torch.Tensor | None:
    """The lengths of q's sequences (batch,), given as one integer or as a tensor, if at all."""
    if whole(given, 0):
        return torch.full(q.shape[:1], int(given), device=q.device)
    fits = isinstance(given, torch.Tensor) and given.shape == q.shape[:1] and given.dtype in (torch.int32, torch.int64)
    require(given is None or fits, "cache_seqlens as an integer, or int32 or int64 (batch,)", cache_seqlens=given)
    return given if isinstance(given, torch.Tensor) else None


def _rotate(
    x: torch.Tensor, at: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, interleaved: bool
) -> torch.Tensor:
    """x (batch, seqlen, heads, head_dim), its first features turned by the angles of positions `at` (batch, seqlen)."""
    fits = isinstance(cos, torch.Tensor) and isinstance(sin, torch.Tensor) and cos.dim() == 2 and cos.shape == sin.shape
    require(fits, "rotary_cos and rotary_sin of one shape (positions, rotary_dim / 2)", rotary_cos=cos, rotary_sin=sin)
    assert cos is not None and sin is not None
    width = 2 * cos.shape[1]
    require(width <= x.shape[3], "a rotary_dim up to head_dim", rotary_cos=cos, x=x)
    enough = not readable(at) or not at.numel() or 0 <= int(at.min()) and int(at.max()) < cos.shape[0]
    require(enough, "rotary_cos and rotary_sin of all positions", positions=at, rotary_cos=cos)
    c, s = cos[at][:, :, None], sin[at][:, :, None]
    a, b = x[..., :width].unflatten(-1, (-1, 2) if interleaved else (2, -1)).unbind(-1 if interleaved else -2)
    a, b = a * c - b * s, a * s + b * c
    turned = torch.stack((a, b), -1 if interleaved else -2).flatten(-2)
    return torch.cat((turned.to(x.dtype), x[..., width:]), -1)


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


def _alibi(slopes: torch.Tensor, q: torch.Tensor, k: torch.Tensor, lens: torch.Tensor | None = None) -> torch.Tensor:
    """The bias -slope * |i + seqlen_k - seqlen_q - j|: (1 or batch, heads, seqlen_q, seqlen_k). lens: of each sequence,
    in place of seqlen_k."""
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
    ends = seqlen_k if lens is None else lens[:, None, None, None]
    at = torch.arange(seqlen_q, device=q.device)[:, None] + (ends - seqlen_q)
    distance = (at - torch.arange(seqlen_k, device=q.device)).abs()
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return slopes.to(dtype).view(-1, heads, 1, 1) * -distance.to(dtype)
