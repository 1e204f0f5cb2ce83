"""Modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from adatom.check import require
from adatom.ops.attention.api import attention
from adatom.ops.norm.api import layer_norm, rms_norm


class Attention(nn.Module):
    """Multi-head attention with its projections, batch-first: (batch, length, embed_dim) to the same.

    Args:
        embed_dim: features of queries and result. key_dim, value_dim: those of keys and values, if they differ.
        heads: query heads. kv_heads: heads of keys and values, a divisor of heads; default heads.
        head_dim: default embed_dim // heads.
        qkv_bias, out_bias: whether the projections add a learned bias.
        sinks: whether each head learns a sink, a logit that takes part in its softmax and attends to nothing.
        causal, window, softcap, scale, precision, backend: as in `adatom.attention`.

    What nn.MultiheadAttention computes, without dropout and without returning weights; `from_torch` copies one.
    """

    def __init__(
        self,
        embed_dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        qkv_bias: bool = True,
        out_bias: bool = True,
        sinks: bool = False,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        precision: str | None = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1 or self.kv_heads < 1 or heads % self.kv_heads:
            require(False, "heads to be a positive multiple of kv_heads", heads=heads, kv_heads=self.kv_heads)
        if head_dim is None and embed_dim % heads:
            require(False, "embed_dim to be a multiple of heads, or a head_dim", embed_dim=embed_dim, heads=heads)
        self.embed_dim, self.head_dim = embed_dim, embed_dim // heads if head_dim is None else head_dim
        self.causal, self.window, self.softcap, self.scale = causal, window, softcap, scale
        self.precision, self.backend = precision, backend
        self.q = nn.Linear(embed_dim, heads * self.head_dim, qkv_bias, device, dtype)
        self.k = nn.Linear(key_dim or embed_dim, self.kv_heads * self.head_dim, qkv_bias, device, dtype)
        self.v = nn.Linear(value_dim or embed_dim, self.kv_heads * self.head_dim, qkv_bias, device, dtype)
        self.out = nn.Linear(heads * self.head_dim, embed_dim, out_bias, device, dtype)
        self.sinks = nn.Parameter(torch.zeros(heads, device=device, dtype=dtype)) if sinks else None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        *,
        bias: torch.Tensor | None = None,
        kv_lens: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from `query` to `key` and `value`; both default to what stands before them.

        Args:
            query: (batch, seqlen_q, embed_dim). key: (batch, seqlen_k, key_dim). value: (batch, seqlen_k, value_dim).
            bias: broadcasts to (batch, heads, seqlen_q, seqlen_k); float, added to the scores, may require grad; or
                bool, True attends.
            kv_lens: (batch,) integers: how many keys of each sequence exist.
            attn_mask: as in nn.MultiheadAttention, where bool means the opposite: True is masked.
                (seqlen_q, seqlen_k) or (batch * heads, seqlen_q, seqlen_k); float is added.
            key_padding_mask: likewise, (batch, seqlen_k): True, or a float of -inf, is padding.

        Returns:
            (batch, seqlen_q, embed_dim).
        """
        key = query if key is None else key
        value = key if value is None else value
        require(query.dim() == 3, "a query of shape (batch, seqlen_q, embed_dim)", query=query)
        if attn_mask is not None:
            if attn_mask.dim() == 3:
                attn_mask = attn_mask.unflatten(0, (query.shape[0], self.heads))
            bias = _and(bias, _attending(attn_mask))
        if key_padding_mask is not None:
            bias = _and(bias, _attending(key_padding_mask)[:, None, None])
        result = attention(
            self.q(query).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2),
            self.k(key).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2),
            self.v(value).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2),
            bias=bias,
            causal=self.causal,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
            kv_lens=kv_lens,
            scale=self.scale,
            precision=self.precision,
            backend=self.backend,
        )
        assert isinstance(result, torch.Tensor)
        return self.out(result.transpose(1, 2).flatten(2))

    @classmethod
    def from_torch(cls, mha: nn.MultiheadAttention) -> Attention:
        """An `Attention` with a copy of the weights of `mha`; batch-first, whatever `mha` is.

        Raises NotImplementedError for dropout, add_bias_kv and add_zero_attn.
        """
        require(mha.dropout == 0, "no dropout: it is not implemented", NotImplementedError, dropout=mha.dropout)
        require(
            mha.bias_k is None and mha.bias_v is None and not mha.add_zero_attn,
            "neither add_bias_kv nor add_zero_attn: not implemented",
            NotImplementedError,
        )
        weight = mha.out_proj.weight
        self = cls(
            mha.embed_dim,
            mha.num_heads,
            key_dim=mha.kdim,
            value_dim=mha.vdim,
            qkv_bias=mha.in_proj_bias is not None,
            out_bias=mha.out_proj.bias is not None,
            device=weight.device,
            dtype=weight.dtype,
        )
        if mha.in_proj_weight is None:
            weights = (mha.q_proj_weight, mha.k_proj_weight, mha.v_proj_weight)
        else:
            weights = mha.in_proj_weight.chunk(3)
        biases = (None,) * 3 if mha.in_proj_bias is None else mha.in_proj_bias.chunk(3)
        with torch.no_grad():
            for linear, w, b in zip((self.q, self.k, self.v), weights, biases):
                linear.weight.copy_(w)
                if b is not None:
                    linear.bias.copy_(b)
            self.out.load_state_dict(mha.out_proj.state_dict())
        return self.train(mha.training)

    def extra_repr(self) -> str:
        given = {n: getattr(self, n) for n in ("heads", "kv_heads", "head_dim", "causal", "window", "softcap")}
        return ", ".join(f"{name}={value}" for name, value in given.items())


def _attending(mask: torch.Tensor) -> torch.Tensor:
    """A mask of nn.MultiheadAttention as a bias: its True is masked, ours attends."""
    return ~mask if mask.dtype == torch.bool else mask


def _and(a: torch.Tensor | None, b: torch.Tensor) -> torch.Tensor:
    """Both biases at once; bool ones mask."""
    if a is None:
        return b
    if a.dtype == torch.bool and b.dtype == torch.bool:
        return a & b
    if a.dtype == torch.bool:
        a, b = b, a
    return torch.where(b, a, -torch.inf) if b.dtype == torch.bool else a + b


class RMSNorm(nn.RMSNorm):
    """`adatom.rms_norm` with a learned weight; over the last dimension only.

    The state_dict is nn.RMSNorm's. eps: None is what nn.RMSNorm takes it for, the epsilon of x's dtype.
    """

    def __init__(
        self, dim: int, eps: float | None = 1e-6, elementwise_affine: bool = True, *, backend: str | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(dim, eps, elementwise_affine, device=device, dtype=dtype)
        require(len(self.normalized_shape) == 1, "one dimension to normalise", dim=dim)
        self.backend = backend

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """y of x's shape (..., dim); with a residual, (y, x + residual)."""
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return rms_norm(x, self.weight, eps=eps, residual=residual, backend=self.backend)


class LayerNorm(nn.LayerNorm):
    """`adatom.layer_norm` with a learned weight and bias; over the last dimension only.

    The state_dict is nn.LayerNorm's.
    """

    def __init__(
        self, dim: int, eps: float = 1e-5, elementwise_affine: bool = True, bias: bool = True, *,
        backend: str | None = None, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(dim, eps, elementwise_affine, bias, device=device, dtype=dtype)
        require(len(self.normalized_shape) == 1, "one dimension to normalise", dim=dim)
        self.backend = backend

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """y of x's shape (..., dim); with a residual, (y, x + residual)."""
        return layer_norm(x, self.weight, self.bias, eps=self.eps, residual=residual, backend=self.backend)
