"""What every part of attention agrees on: options, the problem a kernel is chosen for, and the layout of results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from adatom.device import Device, facts


class Inputs(NamedTuple):
    """The tensors of one call.

    q (batch, heads, seqlen_q, head_dim), k (batch, kv_heads, seqlen_k, head_dim), v (batch, kv_heads, seqlen_k,
    head_dim_v), last dimension contiguous. Packed form: q (tokens_q, heads, head_dim), k and v alike, with
    cu_seqlens_q and cu_seqlens_k, int32 (sequences + 1,).
    bias: 4-D, each dimension 1 or that of the scores (batch, heads, seqlen_q, seqlen_k); float, or bool (True attends).
        Its first may also divide batch: then each slice serves batch / n consecutive elements.
    sinks: (heads,) float. kv_lens: (batch,) int32. These and cu_seqlens are contiguous.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    kv_lens: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None


class Remembered(Inputs):
    """Inputs with a memo: where launchers keep what follows from shapes and options alone, for the next such call.
    Before the first it is empty."""

    memo: dict[str, Any]

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor | None], memo: dict[str, Any]) -> Remembered:
        self = tuple.__new__(cls, tensors)
        self.memo = memo
        return self


class Options(NamedTuple):
    """The numbers of one call. window_left and window_right: -1 is unbounded. softcap: 0 is none."""

    scale: float
    causal: bool
    window_left: int
    window_right: int
    softcap: float
    precision: str


class Problem(NamedTuple):
    """All that a choice of kernel may look at. Hashable; lengths are rounded up to a power of two."""

    device: Device
    dtype: torch.dtype
    precision: str
    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    bias: str  # "none", "key" (one query row), "query" (one key column), "full"
    bias_dtype: torch.dtype | None
    bias_grad: bool
    bias_shared: bool  # one bias slice serves several (batch, head)
    bias_repeated: bool  # one bias slice serves several batch elements, but not all
    causal: bool
    window: bool
    softcap: bool
    sinks: bool
    kv_lens: bool
    varlen: bool
    deterministic: bool
    tma: bool  # strides and addresses of q, k, v suit tensor descriptors (multiples of 16 bytes)
    least_length: int  # the smaller of the lengths, of packed sequences their average, rounded down to a power of two
    window_keys: int  # keys that a window lets a query see at most, rounded like lengths; 0 without a window
    bias_tma: bool  # so do those of the bias, and its keys are contiguous; True without one


def bias_kind(bias: torch.Tensor | None) -> str:
    """ "none", "query" for a bias with one key column, "key" for one with one query row and more columns, "full"
    otherwise."""
    if bias is None:
        return "none"
    if bias.shape[3] == 1:
        return "query"
    return "key" if bias.shape[2] == 1 else "full"


def bias_of_each(bias: torch.Tensor, batch: int) -> torch.Tensor:
    """A bias, or a tensor like it, with a slice for each batch element where several, but not all, share one."""
    return bias if bias.shape[0] in (1, batch) else bias.repeat_interleave(batch // bias.shape[0], 0)


def sum_to_bias(scores: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """scores (batch, heads, 1 or seqlen_q, 1 or seqlen_k) summed to the shape of a bias."""
    if bias.shape[0] not in (1, scores.shape[0]):
        scores = scores.unflatten(0, (bias.shape[0], -1)).sum(1)
    return scores.sum_to_size(bias.shape)


def _ceil_pow2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 1 else n


def _floor_pow2(n: int) -> int:
    return 1 << (n.bit_length() - 1) if n else 0


def suits_tma(*tensors: torch.Tensor, shared: int = 0) -> bool:
    """Whether tensor descriptors can hold these: the last dimension contiguous, all steps positive multiples of 16
    bytes, but for the first `shared` dimensions, which may be expanded."""
    for x in tensors:
        size = x.element_size()
        if x.data_ptr() % 16 or (x.shape[-1] > 1 and x.stride(-1) != 1):
            return False
        steps = [s for i, (n, s) in enumerate(zip(x.shape[:-1], x.stride())) if n > 1 and (s or i >= shared)]
        if any(s <= 0 or s * size % 16 for s in steps):
            return False
    return True


def _window_keys(o: Options, seqlen_k: int) -> int:
    """The keys of a window, whole if one of its sides is unbounded."""
    right = 0 if o.causal and o.window_right < 0 else o.window_right
    if o.window_left < 0 and o.window_right < 0:
        return 0
    return _ceil_pow2(seqlen_k if o.window_left < 0 or right < 0 else min(o.window_left + right + 1, seqlen_k))


def problem(x: Inputs, o: Options, bias_grad: bool = False) -> Problem:
    """The problem that these inputs and options pose."""
    q, k, v = x.q, x.k, x.v
    if x.cu_seqlens_q is None:
        batch, heads, seqlen_q, head_dim = q.shape
        kv_heads, seqlen_k = k.shape[1:3]
    else:
        seqlen_q, heads, head_dim = q.shape
        seqlen_k, kv_heads = k.shape[:2]
        batch = x.cu_seqlens_q.shape[0] - 1
    bias, device = x.bias, facts(q.device)
    return Problem(
        device,
        q.dtype,
        o.precision,
        _ceil_pow2(batch),
        heads,
        kv_heads,
        _ceil_pow2(seqlen_q),
        _ceil_pow2(seqlen_k),
        head_dim,
        v.shape[-1],
        bias_kind(bias),
        None if bias is None else bias.dtype,
        bias_grad,
        bias is not None and bias.shape[:2] != (batch, heads),
        bias is not None and bias.shape[0] not in (1, batch),
        o.causal,
        o.window_left >= 0 or o.window_right >= 0,
        o.softcap > 0,
        x.sinks is not None,
        x.kv_lens is not None,
        x.cu_seqlens_q is not None,
        torch.are_deterministic_algorithms_enabled(),
        device.kind == "cuda" and suits_tma(q, k, v),
        _floor_pow2(min(seqlen_q, seqlen_k) // (1 if x.cu_seqlens_q is None else max(batch, 1))),
        _window_keys(o, seqlen_k),
        device.kind == "cuda" and (bias is None or suits_tma(bias, shared=2)),
    )


def in_rows(x: torch.Tensor) -> torch.Tensor:
    """x, (..., heads, length, dim) or packed (tokens, heads, dim), with contiguous rows less than 2**22 elements apart:
    kernels number the elements of a tile, of up to 512 rows, with 32 bits. A copy where it is not so; but a program
    that is exported, for any length, does not look how far apart they are."""
    near = torch.compiler.is_exporting() or x.stride(-2 if x.dim() == 4 else 0) < 2**22
    return x if near and (x.stride(-1) == 1 or x.shape[-1] == 1) else x.contiguous()


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x, or where it begins between multiples of 16 bytes of its storage, which TMA does not read, a copy."""
    return x.clone() if x.storage_offset() * x.element_size() & 15 else x


def empty_like(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An unwritten tensor of x's shape and, where x is dense, strides."""
    return torch.empty_like(x, dtype=dtype)


def empty(shape: tuple[int, ...], x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An unwritten contiguous tensor on x's device, of x's dtype unless given."""
    return x.new_empty(shape, dtype=dtype or x.dtype)


def empty_out(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """An unwritten output for queries q and values v, whose memory order follows q (heads may lie inside length)."""
    if q.shape[-1] == v.shape[-1]:
        return torch.empty_like(q)
    *lead, _ = q.shape
    if q.dim() == 4 and q.stride(1) < q.stride(2):
        batch, heads, seqlen_q = lead
        return q.new_empty((batch, seqlen_q, heads, v.shape[-1])).transpose(1, 2)
    return q.new_empty((*lead, v.shape[-1]))


def empty_lse(q: torch.Tensor) -> torch.Tensor:
    """An unwritten float32 (float64 for float64 inputs) lse: (batch, heads, seqlen_q), packed (heads, tokens)."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if q.dim() == 4:  # this takes half the time of new_empty
        batch, heads, length, _ = q.shape
        return torch.empty_strided((batch, heads, length), (heads * length, length, 1), dtype=dtype, device=q.device)
    return q.new_empty((q.shape[1], q.shape[0]), dtype=dtype)
