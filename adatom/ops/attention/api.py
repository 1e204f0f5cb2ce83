"""The public functions: attention() on padded batches, attention_varlen() on packed ones."""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad

from adatom.check import dense, finite, readable, require, require_dense
from adatom.operators import on_device
from adatom.ops.attention.op import (
    Attention,
    apply,
    apply_planned,
    attention_compiled,
    attention_fwd,
    ready,
)
from adatom.ops.attention.problem import Inputs, Options, Problem, Remembered, in_rows, problem
from adatom.signature import overseen, signature, transformed, watched
from adatom.tiles.first import together

PRECISIONS = ("ieee", "tf32x3", "tf32")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INDEX = (torch.int32, torch.int64)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    kv_lens: torch.Tensor | None = None,
    scale: float | None = None,
    precision: str | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T * scale + bias) v: differentiable twice, in forward mode, and with respect to the bias.

    Args:
        q: queries (batch, heads, seqlen_q, head_dim); float16, bfloat16, float32 or float64 (float64 runs in PyTorch).
            Or 5-D, (batch, rows, heads, seqlen_q, head_dim), as in triangle attention: each row attends by itself;
            then k, v, bias, kv_lens (batch, rows) and the results have the dimension too.
        k: keys (batch, kv_heads, seqlen_k, head_dim); kv_heads divides heads (grouped-query attention).
        v: values (batch, kv_heads, seqlen_k, head_dim_v). Any strides; a tensor whose last dimension is not contiguous,
            or whose rows overlap or lie 2**22 elements or more apart, is copied.
        bias: added to the scores after scale and softcap; broadcasts to (batch, heads, seqlen_q, seqlen_k), any float
            dtype (float64 inputs take float64), may require grad; -inf masks. Or bool: True attends. Its batch may
            also divide that of q: each slice serves that many consecutive elements (repeat_interleave, without the
            copy). For 5-D q, (batch, 1, heads, seqlen_q, seqlen_k) is shared by all rows.
        causal: query i sees keys up to i + len_k - seqlen_q (aligned bottom-right, as flash-attn).
        window: (left, right): query i sees keys from i + len_k - seqlen_q - left to i + len_k - seqlen_q + right;
            None (or -1) is unbounded.
        softcap: scores become softcap * tanh(scores / softcap), before the bias.
        sinks: (heads,) float: adds exp(sinks[h]) to the softmax denominator; may require grad.
        kv_lens: (batch,) int32 or int64, on the inputs' device: keys of each sequence that exist, the rest is padding;
            causal and window align to it. Must lie in [0, seqlen_k]: checked on the CPU; on a GPU, under vmap and in
            compiled regions, clamped.
        scale: default 1 / sqrt(head_dim).
        precision: arithmetic of float32 matrix products on tensor cores: "tf32x3" (default: as accurate as float32),
            "tf32" (as PyTorch's TF32) or "ieee" (float32 multiply-adds). No effect on other dtypes and CPUs. The first
            two are accurate relative to the largest element of a tile (some 64 rows of q, k or v; `hopper_float`: a
            whole head of these and of the gradient of out).
        return_lse: also return lse, the natural log of the softmax denominator, float32 (batch, heads, seqlen_q),
            differentiable.
        backend: one backend by name (see `adatom.explain`), with no fallback; or "deterministic": the fastest whose
            results do not vary from run to run, in every derivative. Default: the fastest that fits.

    Returns:
        out (batch, heads, seqlen_q, head_dim_v) in q's dtype, in q's memory order (if head_dim_v is not head_dim, heads
        inside lengths or lengths inside heads, as in q); or (out, lse). A query with nothing to attend to gives 0, lse
        -inf, and zero gradients.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit; the message prints them.
        NotImplementedError: no kernel, or not the one asked for, takes this problem; the message lists the reasons.
        RuntimeError: on a third derivative.

    Source: Vaswani et al., arXiv:1706.03762; tiling after Dao, arXiv:2307.08691; second derivative:
    docs/double_backward.md.
    """
    tensors = q, k, v, bias, sinks, kv_lens
    plain = window is scale is softcap is None and type(causal) is bool
    kinds = None if plain else _kinds(causal, window, scale, softcap)
    options = kinds, causal, window, softcap, scale, precision, backend, return_lse
    found = _again(tensors, options)
    if found is None:
        if isinstance(q, torch.Tensor) and q.dim() == 5:
            return _of_rows(tensors, options)
        found = _planned(tensors, options)
    if found is None:
        x, o = _checked(q, k, v, bias, causal, window, softcap, sinks, kv_lens, scale, precision)
        results = _call(x, o, backend)
    else:
        plan, wanted = found
        if wanted and torch.is_grad_enabled():
            return apply_planned(plan, *tensors[: plan.given])
        results = plan(*tensors[: plan.given])
    return results if return_lse else results[0]


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    precision: str | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    bias: None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention within each sequence of a packed batch: no padding anywhere. Otherwise as `attention`.

    Args:
        q: (tokens_q, heads, head_dim). k: (tokens_k, kv_heads, head_dim). v: (tokens_k, kv_heads, head_dim_v).
        cu_seqlens_q, cu_seqlens_k: int32 or int64 (sequences + 1,), on the inputs' device: sequence i is tokens
            cu_seqlens[i] to cu_seqlens[i + 1]. Must start at 0, not decrease, and end at the number of tokens: checked
            on the CPU; in compiled regions and on a GPU, where a check would wait for the device, it is the caller's
            duty. One tensor given twice says that queries and keys are the same tokens: a causal mask is then faster on
            Hopper.
        causal, window, softcap, sinks, scale, precision, return_lse, backend: as in `attention`.
        bias: not supported for packed sequences; raises NotImplementedError.

    Returns:
        out (tokens_q, heads, head_dim_v); with return_lse also lse, float32 (heads, tokens_q).

    Raises: as `attention`.
    """
    require(
        bias is None,
        "no bias: attention_varlen has none (a bias per packed sequence is not implemented; pad the batch and use "
        "attention(kv_lens=...))",
        NotImplementedError,
    )
    x, o = _checked_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, window, softcap, sinks, scale, precision)
    out, lse = _call(x, o, backend)
    return (out, lse) if return_lse else out


def inputs_of(*args: Any, **kwargs: Any) -> tuple[Inputs, Options, str | None]:
    """What kernels get for `attention(*args, **kwargs)` (or `attention_varlen`, given cu_seqlens), and `backend`."""
    varlen = len(args) > 3 or "cu_seqlens_q" in kwargs
    bound = inspect.signature(attention_varlen if varlen else attention).bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    backend = given.pop("backend")
    given.pop("return_lse")
    if varlen:
        given.pop("bias")
    elif isinstance(given["q"], torch.Tensor) and given["q"].dim() == 5:
        names = ("q", "k", "v", "bias", "kv_lens")
        given.update(zip(names, _without_rows(*(given[name] for name in names))))
    x, o = (_checked_varlen if varlen else _checked)(**given)
    return x, o, backend


def problem_of(*args: Any, **kwargs: Any) -> tuple[Problem, str | None]:
    """The problem that `attention(*args, **kwargs)` (or `attention_varlen`, given cu_seqlens) poses, and `backend`."""
    x, o, backend = inputs_of(*args, **kwargs)
    return problem(x, o, bias_grad=x.bias is not None and x.bias.requires_grad), backend


def _call(x: Inputs, o: Options, backend: str | None) -> Any:
    require(backend is None or isinstance(backend, str), "a backend by name, or None", TypeError, backend=backend)
    if transformed():
        return Attention.apply(*x, *o, backend)
    if torch.compiler.is_compiling():
        return attention_compiled(*x, *o, backend)
    wanted = any(t is not None and t.requires_grad for t in x[:5])
    if torch.is_grad_enabled() and wanted or forward_ad._current_level >= 0:  # forward mode needs no grad mode
        return apply(Attention, *unwrap_dead_wrappers(x), *o, backend)
    return attention_fwd(*x, *o, backend)


class _Plan:
    """A call that was checked before: its options, launcher and memo. Python's way to the GPU is long; this is the
    short one, past argument checks, PyTorch's dispatcher and the choice of a kernel; to a CPU's too. given: how many
    of q, k, v, bias, sinks and kv_lens it takes, 3 or 6."""

    def __init__(self, key: Any, x: Inputs, o: Options, backend: str | None, return_lse: bool) -> None:
        self.o, self.options, self.return_lse = o, (*o, backend), return_lse
        self.launch, self.memo = ready(("attention", key), "attention_fwd", x, o, backend, False)
        self.device = x.q.get_device()
        self.aligned = not any(t.data_ptr() & 15 for t in x if t is not None)
        self.given = 3 if x.bias is x.sinks is x.kv_lens is None else 6
        self.absent = (None,) * (len(x) - self.given)

    def __call__(self, *tensors: torch.Tensor | None) -> Any:
        """(out, lse). `Remembered.of` and the usual case of `on_device` are written out: calls cost time."""
        x = tuple.__new__(Remembered, tensors + self.absent)
        x.memo = self.memo
        if not self.memo:
            self.memo["called"] = True
            return on_device(together, x.q, self.launch, x, self.o)
        if self.device < 0 or self.device == torch._C._cuda_getDevice():
            return self.launch(x, self.o)
        return on_device(self.launch, x.q, x, self.o)


_Found = tuple[_Plan, bool]  # and whether a tensor requires a gradient
_plans: dict[Any, _Plan] = {}
_latest: dict[Any, tuple[tuple[Any, _Found], ...]] = {}  # by shapes and options: what compares tensors, what it found


def _kinds(causal: Any, window: Any, *numbers: Any) -> tuple[Any, ...]:
    """The types of options, some of which checks refuse though they equal others: no plan is for both."""
    return tuple(map(type, (causal, *(window if isinstance(window, tuple) else ()), *numbers)))


def _again(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> _Found | None:
    """The plan of one of the latest calls of these shapes and options on a GPU, if its tensors were like these: PyTorch
    compares them at once, with the keys of its dispatcher, which tell most of what `watched` looks for."""
    q, k, v, bias, sinks, kv_lens = tensors
    if not _latest or q is k or q is v or k is v or overseen():  # what compares takes no tensor twice
        return None
    try:
        latest = _latest.get(_outline(tensors, options), ())
    except (AttributeError, TypeError, RuntimeError):  # not dense tensors; a list among the options
        return None
    given = [q, k, v] if bias is sinks is kv_lens is None else [t for t in tensors if t is not None]
    for alike, found in latest:
        if alike(*given):
            for t in given:
                if t.data_ptr() & 15:
                    return None
            return found
    return None


def _outline(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, ...]:
    """What `_latest` goes by. Of all tensors: what compares them aborts at one that has no shape, a nested one."""
    q, k, v, bias, sinks, kv_lens = tensors
    exact = torch._C._get_deterministic_algorithms()
    if bias is sinks is kv_lens is None:
        return q.shape, k.shape, v.shape, options, exact
    return q.shape, k.shape, v.shape, *[t if t is None else t.shape for t in (bias, sinks, kv_lens)], options, exact


def _remember(found: _Found, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> None:
    """Let `_again` find this, and three more of these shapes: layers that differ in strides or in a bias take turns."""
    given = [t for t in tensors if t is not None]
    alike = TensorGuards(*given, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    if alike(*given):
        outline = _outline(tensors, options)
        _latest[outline] = (alike, found), *_latest.get(outline, ())[:3]


def _planned(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> _Found | None:
    """The plan of a call, given (q, k, v, bias, sinks, kv_lens) and (kinds, causal, window, softcap, scale, precision,
    backend, return_lse), which `_again` will find; None for those that are traced, profiled, transformed, cast or
    copied, and for kv_lens on a CPU, which are looked at."""
    if watched():
        return None
    q, k, v, bias, sinks, kv_lens = tensors
    key = signature(tensors, cpu=kv_lens is None)
    if key is None:
        return None
    try:
        plan = _plans.get((key, options))
    except TypeError:  # a list among the options
        return None
    if plan is None:
        if any(isinstance(option, torch.Tensor) for option in options):
            return None  # its value is not in the key
        _, causal, window, softcap, scale, precision, backend, return_lse = options
        x, o = _checked(q, k, v, bias, causal, window, softcap, sinks, kv_lens, scale, precision)
        if any(a is not b for a, b in zip(x, tensors)):
            return None
        if len(_plans) >= 4096:  # lengths that never repeat must not fill the memory
            _plans.clear()
            _latest.clear()
        plan = _plans[key, options] = _Plan((key, options[:-1]), x, o, backend, return_lse)
    found = plan, any(t is not None and t.requires_grad for t in tensors)
    if plan.device >= 0 and plan.aligned and not (q is k or q is v or k is v):
        _remember(found, tensors, options)
    return found


def _of_rows(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    """`attention` of 5-D tensors."""
    q, k, v, bias, sinks, kv_lens = tensors
    rows = q.shape[:2]
    q, k, v, bias, kv_lens = _without_rows(q, k, v, bias, kv_lens)
    names = ("causal", "window", "softcap", "scale", "precision", "backend", "return_lse")
    results: Any = attention(q, k, v, bias=bias, sinks=sinks, kv_lens=kv_lens, **dict(zip(names, options[1:])))
    return tuple(r.unflatten(0, rows) for r in results) if options[-1] else results.unflatten(0, rows)


def _autocast(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q, k, v as autocast gives them to scaled_dot_product_attention: floats but float64 take its dtype."""
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        require(False, "tensors q, k and v", TypeError, q=q, k=k, v=v)
    require_dense(q, k, v, instead=" (lengths that differ: attention_varlen)")
    device = q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))


def _without_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, kv_lens: torch.Tensor | None
) -> tuple[Any, ...]:
    """5-D arguments as 4-D ones, whose batch is (batch, rows): views where strides allow."""
    batch, rows = q.shape[:2]
    if not (isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        require(False, "tensors q, k and v", TypeError, q=q, k=k, v=v)
    if k.dim() != 5 or v.dim() != 5 or not q.shape[:2] == k.shape[:2] == v.shape[:2]:
        require(False, "5-D q, k and v (batch, rows, heads, length, head_dim) of one batch and rows", q=q, k=k, v=v)
    if isinstance(bias, torch.Tensor) and bias.dim() > 3:
        if bias.dim() != 5 or bias.shape[0] not in (1, batch) or bias.shape[1] not in (1, rows):
            require(False, f"bias that broadcasts to ({batch}, {rows}, heads, seqlen_q, seqlen_k), 5-D", q=q, bias=bias)
        if bias.shape[1] == 1:
            bias = bias[:, 0]
        else:
            if bias.shape[0] < batch:
                require(False, "a bias for each row of each batch element, or one for all rows", q=q, bias=bias)
            bias = bias.flatten(0, 1)
        if not batch * rows:  # none needs a slice
            bias = bias[:1]
    if isinstance(kv_lens, torch.Tensor):
        if kv_lens.shape != (batch, rows):
            require(False, f"kv_lens of shape ({batch}, {rows})", q=q, kv_lens=kv_lens)
        kv_lens = kv_lens.flatten()
    return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), bias, kv_lens


def _checked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    kv_lens: torch.Tensor | None,
    scale: float | None,
    precision: str | None,
) -> tuple[Inputs, Options]:
    q, k, v = _autocast(q, k, v)
    if not (q.dim() == k.dim() == v.dim() == 4):
        require(False, "4-D q, k and v (batch, heads, length, head_dim)", q=q, k=k, v=v)
    batch, heads, seqlen_q, head_dim = q.shape
    batch_k, kv_heads, seqlen_k, head_dim_k = k.shape
    if not (batch == batch_k == v.shape[0] and kv_heads == v.shape[1] and seqlen_k == v.shape[2]):
        require(False, "q, k, v of one batch, and k and v of the same heads and length", q=q, k=k, v=v)
    _check_common(q, k, v, heads, kv_heads, head_dim, head_dim_k, sinks)
    if bias is not None:
        bias = checked_bias(bias, (batch, heads, seqlen_q, seqlen_k), q, k)
    if kv_lens is not None:
        if not dense(kv_lens) or kv_lens.dtype not in _INDEX:
            require(False, "kv_lens as a dense tensor of int32 or int64", TypeError, kv_lens=kv_lens)
        if kv_lens.shape != (batch,) or kv_lens.device != q.device:
            require(False, f"kv_lens of shape ({batch},) on q's device", q=q, kv_lens=kv_lens)
        if readable(kv_lens) and kv_lens.numel():
            low, high = int(kv_lens.min()), int(kv_lens.max())
            if low < 0 or high > seqlen_k:
                require(False, f"kv_lens between 0 and seqlen_k = {seqlen_k}", smallest=low, largest=high)
    o = options_of(head_dim, causal, window, softcap, scale, precision)
    if not torch.compiler.is_exporting():  # an edge that cuts nothing would cost time, but a program is for all lengths
        if o.window_left >= seqlen_k - 1:
            o = o._replace(window_left=-1)
        if o.window_right >= seqlen_q - 1:
            o = o._replace(window_right=-1)
    return Inputs(_rows(q), _rows(k), _rows(v), bias, *_in_order(sinks, kv_lens)), o


def _checked_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    scale: float | None,
    precision: str | None,
) -> tuple[Inputs, Options]:
    q, k, v = _autocast(q, k, v)
    if not (q.dim() == k.dim() == v.dim() == 3):
        require(False, "3-D q, k and v (tokens, heads, head_dim)", q=q, k=k, v=v)
    tokens_q, heads, head_dim = q.shape
    tokens_k, kv_heads, head_dim_k = k.shape
    if v.shape[:2] != (tokens_k, kv_heads):
        require(False, "k and v of the same tokens and heads", q=q, k=k, v=v)
    _check_common(q, k, v, heads, kv_heads, head_dim, head_dim_k, sinks)
    for name, cu, tokens in (("cu_seqlens_q", cu_seqlens_q, tokens_q), ("cu_seqlens_k", cu_seqlens_k, tokens_k)):
        if not dense(cu) or cu.dtype not in _INDEX:
            require(False, f"{name} as a dense tensor of int32 or int64", TypeError, **{name: cu})
        if cu.dim() != 1 or not cu.numel() or cu.shape != cu_seqlens_q.shape or cu.device != q.device:
            require(
                False,
                "cu_seqlens_q and cu_seqlens_k both of shape (sequences + 1,) on q's device",
                q=q,
                cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_k=cu_seqlens_k,
            )
        if readable(cu):
            if int(cu[0]) != 0 or int(cu[-1]) != tokens or bool((cu.diff() < 0).any()):
                require(
                    False, f"{name} to start at 0, never decrease and end at {tokens} tokens", **{name: cu.tolist()}
                )
    o = options_of(head_dim, causal, window, softcap, scale, precision)
    sinks, cu_seqlens_q, cu_seqlens_k = _in_order(sinks, cu_seqlens_q, cu_seqlens_k)
    return Inputs(_rows(q), _rows(k), _rows(v), None, sinks, None, cu_seqlens_q, cu_seqlens_k), o


def _check_common(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    head_dim_k: int,
    sinks: torch.Tensor | None,
) -> None:
    if head_dim != head_dim_k:
        require(False, "q and k of the same head_dim", q=q, k=k)
    if head_dim < 1 or v.shape[-1] < 1:
        require(False, "head_dim of at least 1", q=q, k=k, v=v)
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        require(False, "heads of q to be a multiple of the heads of k and v", q=q, k=k, v=v)
    if q.dtype not in _FLOATS or not (q.dtype == k.dtype == v.dtype):
        require(False, "q, k, v of one dtype: float16, bfloat16, float32 or float64", TypeError, q=q, k=k, v=v)
    if not (q.device == k.device == v.device):
        require(False, "q, k, v on one device", q=q, k=k, v=v)
    if sinks is not None:
        if not dense(sinks) or sinks.dtype not in _FLOATS:
            require(False, "sinks as a dense tensor of a float dtype", TypeError, sinks=sinks)
        if sinks.shape != (heads,) or sinks.device != q.device:
            require(False, f"sinks of shape ({heads},) on q's device", q=q, sinks=sinks)


def checked_bias(
    bias: torch.Tensor, scores: tuple[int, int, int, int], q: torch.Tensor, k: torch.Tensor
) -> torch.Tensor:
    """A bias as kernels may read it, 4-D; ValueError and TypeError for one that does not fit scores of that shape."""
    if not dense(bias) or bias.dtype not in (torch.bool, *_FLOATS):
        require(False, "bias as a dense tensor of a float dtype, or bool (True = attend)", TypeError, bias=bias)
    if (bias.dtype == torch.float64) != (q.dtype == torch.float64) and bias.dtype != torch.bool:
        require(False, "a float64 bias with float64 inputs, and only with them", TypeError, q=q, bias=bias)
    if bias.device != q.device:
        require(False, "bias on q's device", q=q, bias=bias)
    shape = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    divides = shape[0] in (1, scores[0]) or shape[0] and scores[0] and scores[0] % shape[0] == 0
    if not divides or len(shape) > 4 or any(b != 1 and b != s for b, s in zip(shape[1:], scores[1:])):
        require(False, f"bias that broadcasts to (batch, heads, seqlen_q, seqlen_k) = {scores}", q=q, k=k, bias=bias)
    bias = bias if bias.dim() == 4 else bias[(None,) * (4 - bias.dim())]
    if torch.compiler.is_exporting():
        return bias
    steps = sum(s for n, s in zip(bias.shape[2:], bias.stride()[2:]) if n > 1)
    return bias if steps < 2**24 else bias.contiguous()  # kernels number the elements of a tile with 32 bits


def _side(keys: Any, window: Any) -> Any:
    """One side of a window as an integer: -1 where it is None. A size that a compiler traces stays one."""
    if keys is None or isinstance(keys, bool):
        return -1 if keys is None else int(keys)
    if isinstance(keys, (int, torch.SymInt)):
        return keys
    if isinstance(keys, torch.Tensor) or not hasattr(keys, "__index__"):
        require(False, "window of integers or None", TypeError, window=window)
    return operator.index(keys)


def options_of(
    head_dim: int,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    softcap: float | None,
    scale: float | None,
    precision: str | None,
) -> Options:
    """The options of a call, checked; ValueError and TypeError for what they are not."""
    left = right = -1
    if window is not None:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            require(False, "window as a pair (left, right)", TypeError, window=window)
        left, right = (_side(keys, window) for keys in window)
        if left < -1 or right < -1:
            require(False, "window of non-negative numbers, or None (or -1) for unbounded", window=window)
        left, right = (min(w, 2**30) if isinstance(w, int) else w for w in (left, right))  # kernels add to 32 bits
    if softcap is None:
        softcap = 0.0
    elif not finite(softcap, 0):
        require(False, "a finite softcap > 0 (or None), not one that is learned", softcap=softcap)
    if precision is None:
        precision = "tf32x3"
    elif precision not in PRECISIONS:
        require(False, f"precision to be one of {PRECISIONS}", precision=precision)
    if scale is None:
        scale = head_dim**-0.5
    elif not finite(scale):
        require(False, "a finite scale (of a learned one, multiply q by it)", scale=scale)
    if not isinstance(causal, (int, torch.SymBool)) and type(causal).__name__ not in ("bool", "bool_"):  # NumPy's
        require(False, "causal as True or False", TypeError, causal=causal)
    return Options(float(scale), bool(causal), left, right, float(softcap), precision)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x as kernels may read it. Rows that overlap, as those of `unfold` may, are copied too: a result like them in
    strides could not have contiguous rows."""
    overlap = any(0 < stride < x.shape[-1] and n > 1 for n, stride in zip(x.shape[:-1], x.stride()))
    return x.contiguous() if overlap else in_rows(x)


def _in_order(*vectors: Any) -> Any:
    """Vectors as kernels read them, one number after the other: every second number or an expanded one is copied."""
    return (x if x is None else x.contiguous() for x in vectors)
