"""Modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from adatom.check import finite, require, require_dense, require_operators, supplied, whole
from adatom.ops.attention.api import attention, checked_bias
from adatom.ops.attention.api import options_of as attention_options
from adatom.ops.gated.api import mlp
from adatom.ops.linear.api import linear, options_of
from adatom.ops.linear.torch_linear import VALUES
from adatom.ops.moe.api import moe_routed
from adatom.ops.norm.api import layer_norm, rms_norm
from adatom.ops.route.api import check_routing, moe_route, within_capacity
from adatom.registry import require_backend


class Attention(nn.Module):
    """Multi-head attention with its projections, batch-first: (batch, length, embed_dim) to the same.

    Args:
        embed_dim: features of queries and result. key_dim, value_dim: those of keys and values, if they differ.
        heads: query heads. kv_heads: heads of keys and values, a divisor of heads; default heads.
        head_dim: default embed_dim // heads.
        qkv_bias, out_bias: whether the projections add a learned bias.
        sinks: whether each head learns a sink, a logit that takes part in its softmax and attends to nothing.
        causal, window, softcap, scale, precision, backend: as in `adatom.attention`.

    What nn.MultiheadAttention computes, without dropout and without weights: it returns the result alone, and takes no
    `need_weights`. `from_torch` copies one.
    """

    def __init__(
        self, embed_dim: int, heads: int, *, kv_heads: int | None = None, head_dim: int | None = None,
        key_dim: int | None = None, value_dim: int | None = None, qkv_bias: bool = True, out_bias: bool = True,
        sinks: bool = False, causal: bool = False, window: tuple[int | None, int | None] | None = None,
        softcap: float | None = None, scale: float | None = None, precision: str | None = None,
        backend: str | None = None, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.kv_heads = heads, heads if kv_heads is None else kv_heads
        sizes = {"embed_dim": embed_dim} | supplied(key_dim=key_dim, value_dim=value_dim)
        require(all(whole(n, 1) for n in sizes.values()), "numbers of features, at least 1", **sizes)
        require_backend("attention", backend)
        self.features = embed_dim, key_dim or embed_dim, value_dim or embed_dim
        if not (whole(heads, 1) and whole(self.kv_heads, 1)) or heads % self.kv_heads:
            require(False, "heads to be a positive multiple of kv_heads", heads=heads, kv_heads=self.kv_heads)
        if head_dim is None and embed_dim % heads:
            require(False, "embed_dim to be a multiple of heads, or a head_dim", embed_dim=embed_dim, heads=heads)
        self.embed_dim, self.head_dim = embed_dim, embed_dim // heads if head_dim is None else head_dim
        require(whole(self.head_dim, 1), "a head_dim of at least 1", head_dim=self.head_dim)
        attention_options(self.head_dim, causal, window, softcap, scale, precision)
        self.causal, self.window, self.softcap, self.scale = causal, window, softcap, scale
        self.precision, self.backend = precision, backend
        self.q = nn.Linear(embed_dim, heads * self.head_dim, qkv_bias, device, dtype)
        self.k = nn.Linear(self.features[1], self.kv_heads * self.head_dim, qkv_bias, device, dtype)
        self.v = nn.Linear(self.features[2], self.kv_heads * self.head_dim, qkv_bias, device, dtype)
        self.out = nn.Linear(heads * self.head_dim, embed_dim, out_bias, device, dtype)
        self.sinks = nn.Parameter(torch.empty(heads, device=device, dtype=dtype)) if sinks else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sinks of 0; the projections reset their own."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor | None = None, value: torch.Tensor | None = None, *,
        bias: torch.Tensor | None = None, kv_lens: torch.Tensor | None = None, attn_mask: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attend from `query` to `key` and `value`; both default to what stands before them.

        Args:
            query: (batch, seqlen_q, embed_dim). key: (batch, seqlen_k, key_dim). value: (batch, seqlen_k, value_dim).
            bias: broadcasts to (batch, heads, seqlen_q, seqlen_k); float, added to the scores, may require grad; or
                bool, True attends. Beside a mask its batch is 1 or that of query.
            kv_lens: (batch,) integers: how many keys of each sequence exist.
            attn_mask: as in nn.MultiheadAttention, where bool means the opposite: True is masked.
                (seqlen_q, seqlen_k) or (batch * heads, seqlen_q, seqlen_k); float is added.
            key_padding_mask: likewise, (batch, seqlen_k): True, or a float of -inf, is padding.

        Returns:
            (batch, seqlen_q, embed_dim).
        """
        key = query if key is None else key
        value = key if value is None else value
        given = {"query": query, "key": key, "value": value}
        optional = supplied(bias=bias, attn_mask=attn_mask, key_padding_mask=key_padding_mask)
        for name, t in (given | optional).items():
            require(isinstance(t, torch.Tensor), "tensors", TypeError, **{name: t})
            fits = name in given or t.dtype == torch.bool or t.is_floating_point()
            require(fits, "a mask of bool, or a float one, which is added", TypeError, **{name: t})
        fits = all(t.dim() == 3 and t.shape[2] == n for t, n in zip(given.values(), self.features))
        require(fits, f"query, key and value (batch, length, features) of {self.features} features", **given)
        scores = query.shape[0], self.heads, query.shape[1], key.shape[1]
        if bias is not None and len(optional) > 1:  # they become one, which attention checks
            bias = checked_bias(bias, scores, query, key)
            fits = bias.shape[0] == 1 or bias.shape[0] == scores[0]
            require(fits, "beside a mask, a bias of batch 1 or that of query", query=query, bias=bias)
        if attn_mask is not None:
            fits = all(n == 1 or n == s for n, s in zip(attn_mask.shape[-2:], scores[2:]))  # compilers do not know `in`
            fits &= attn_mask.dim() == 2 or attn_mask.dim() == 3 and attn_mask.shape[0] == scores[0] * self.heads
            require(fits, "an attn_mask ([batch * heads,] seqlen_q, seqlen_k)", **given, attn_mask=attn_mask)
            if attn_mask.dim() == 3:
                attn_mask = attn_mask.unflatten(0, (query.shape[0], self.heads))
            bias = _and(bias, _attending(attn_mask))
        if key_padding_mask is not None:
            fits = key_padding_mask.shape == key.shape[:2] and key.shape[0] == scores[0]
            require(fits, "a key_padding_mask (batch, seqlen_k)", **given, key_padding_mask=key_padding_mask)
            bias = _and(bias, _attending(key_padding_mask)[:, None, None])
        result = attention(
            self.q(query).unflatten(-1, (-1, self.head_dim)).transpose(1, 2),  # tensor parallelism: some of the heads
            self.k(key).unflatten(-1, (-1, self.head_dim)).transpose(1, 2),
            self.v(value).unflatten(-1, (-1, self.head_dim)).transpose(1, 2),
            bias=bias, causal=self.causal, window=self.window, softcap=self.softcap, sinks=self.sinks, kv_lens=kv_lens,
            scale=self.scale, precision=self.precision, backend=self.backend,
        )  # fmt: skip
        assert isinstance(result, torch.Tensor)
        return self.out(result.transpose(1, 2).flatten(2))

    @classmethod
    def from_torch(cls, mha: nn.MultiheadAttention) -> Attention:
        """An `Attention` with a copy of the weights of `mha`; batch-first, whatever `mha` is.

        Raises NotImplementedError for dropout, add_bias_kv and add_zero_attn; TypeError for another module.
        """
        require(isinstance(mha, nn.MultiheadAttention), "an nn.MultiheadAttention", TypeError, mha=mha)
        require(mha.dropout == 0, "no dropout: it is not implemented", NotImplementedError, dropout=mha.dropout)
        fits = mha.bias_k is None and mha.bias_v is None and not mha.add_zero_attn
        require(fits, "neither add_bias_kv nor add_zero_attn: not implemented", NotImplementedError)
        weight = mha.out_proj.weight
        self = cls(
            mha.embed_dim, mha.num_heads, key_dim=mha.kdim, value_dim=mha.vdim, device=weight.device,
            dtype=weight.dtype, qkv_bias=mha.in_proj_bias is not None, out_bias=mha.out_proj.bias is not None,
        )  # fmt: skip
        joint = mha.in_proj_weight is not None
        given = (mha.in_proj_weight,) * 3 if joint else (mha.q_proj_weight, mha.k_proj_weight, mha.v_proj_weight)
        with torch.no_grad():
            for i, (linear, w) in enumerate(zip((self.q, self.k, self.v), given)):
                linear.weight.copy_(w.chunk(3)[i] if joint else w).requires_grad_(w.requires_grad)
                if mha.in_proj_bias is not None:
                    linear.bias.copy_(mha.in_proj_bias.chunk(3)[i]).requires_grad_(mha.in_proj_bias.requires_grad)
            for name, p in self.out.named_parameters():
                p.copy_(w := getattr(mha.out_proj, name)).requires_grad_(w.requires_grad)
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


def _check_norm(norm: nn.RMSNorm | nn.LayerNorm, backend: str | None) -> None:
    """Raise ValueError or TypeError for what only its calls would refuse. An eps of None is RMSNorm's alone."""
    require(len(norm.normalized_shape) == 1, "one dimension to normalise", dim=norm.normalized_shape)
    require(finite(norm.eps, 0) or norm.eps is None and isinstance(norm, nn.RMSNorm), "a finite eps >= 0", eps=norm.eps)
    require_backend("norm", backend)


class RMSNorm(nn.RMSNorm):
    """`adatom.rms_norm` with a learned weight; over the last dimension only.

    The state_dict is nn.RMSNorm's. eps: None is the epsilon of float32, as in PyTorch 2.13 (of float64 for
    float64).
    """

    def __init__(
        self, dim: int, eps: float | None = 1e-6, elementwise_affine: bool = True, *, backend: str | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(dim, eps, elementwise_affine, device=device, dtype=dtype)
        _check_norm(self, backend)
        self.backend = backend

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """y of x's shape (..., dim); with a residual, (y, x + residual)."""
        wide = torch.float64 if getattr(x, "dtype", None) == torch.float64 else torch.float32
        eps = torch.finfo(wide).eps if self.eps is None else self.eps
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
        _check_norm(self, backend)
        self.backend = backend

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """y of x's shape (..., dim); with a residual, (y, x + residual)."""
        return layer_norm(x, self.weight, self.bias, eps=self.eps, residual=residual, backend=self.backend)


class MoE(nn.Module):
    """A mixture of gated experts with its router, and an expert that all tokens share: (..., dim) to the same.

    Args:
        dim: features of x. hidden: of each expert. experts, top_k: how many there are, and how many a token goes to.
        shared: features of the shared expert, which is added with weight 1; 0: there is none.
        selection_bias: whether there is a buffer `selection_bias` (experts,), 0 at first, which the training loop moves
            to balance the experts (DeepSeek-V3). It stays float32 when the module is cast: its steps are small.
        router_dtype: of the router's product; default x's. The router's weight is a parameter `router` (experts, dim).
        renormalize, scoring, groups, scale, capacity: as in `adatom.moe_route`; activation, recompute, backend: as in
            `adatom.moe_routed`.

    The experts' weights are parameters `gate_up` (experts, 2 * hidden, dim) and `down` (experts, dim, hidden).
    ValueError and TypeError for what does not fit: of the arguments here, of x when it is called.
    """

    selection_bias: torch.Tensor | None

    def __init__(
        self, dim: int, hidden: int, experts: int, top_k: int, *, shared: int = 0, renormalize: bool = True,
        scoring: str = "softmax", selection_bias: bool = False, scale: float = 1.0, capacity: int | None = None,
        groups: tuple[int, int] | tuple[int, int, int] | None = None, router_dtype: torch.dtype | None = None,
        activation: str = "silu", recompute: bool = False, backend: str | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        fits = whole(experts, 1) and all(whole(n, 0) for n in (dim, hidden, shared))
        sizes = {"dim": dim, "hidden": hidden, "experts": experts, "shared": shared}
        require(fits, "integers: experts of at least 1, dim, hidden and shared of at least 0", **sizes)
        check_routing(experts, top_k, scoring, groups, scale, capacity)
        require(not isinstance(scale, torch.Tensor), "a number as scale, which is no parameter here", scale=scale)
        options_of(activation, True, None)
        require_backend("moe", backend)
        fits = router_dtype is None or isinstance(router_dtype, torch.dtype) and router_dtype.is_floating_point
        require(fits, "a floating router_dtype", TypeError, router_dtype=router_dtype)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.top_k, self.router_dtype = top_k, router_dtype
        self.routing: Any = {"renormalize": renormalize, "scoring": scoring, "groups": groups, "scale": scale}
        self.capacity, self.activation, self.recompute, self.backend = capacity, activation, recompute, backend
        self.router = parameter(experts, dim)
        self.gate_up, self.down = parameter(experts, 2 * hidden, dim), parameter(experts, dim, hidden)
        self.shared_gate_up = parameter(2 * shared, dim) if shared else None
        self.shared_down = parameter(dim, shared) if shared else None
        bias = torch.zeros(experts, device=device, dtype=torch.float32) if selection_bias else None
        self.register_buffer("selection_bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights as nn.Linear does its own; no selection bias."""
        for weight in self.parameters():
            bound = weight.shape[-1] ** -0.5 if weight.shape[-1] else 0.0
            nn.init.uniform_(weight, -bound, bound)
        if self.selection_bias is not None:
            self.selection_bias.zero_()

    def forward(self, x: torch.Tensor, return_routing: bool = False) -> Any:
        """(..., dim). With return_routing, (that, router_logits (..., experts), indices (..., top_k)), as
        `adatom.load_balancing_loss` takes them: indices are those before pairs are dropped for capacity."""
        self._check(x)
        if self.router_dtype is None:
            logits = nn.functional.linear(x, self.router)
        else:
            with torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False):
                logits = nn.functional.linear(x.to(self.router_dtype), self.router.to(self.router_dtype))
        weights, indices = moe_route(logits, self.top_k, selection_bias=self.selection_bias, **self.routing)
        chosen = indices
        if self.capacity is not None:
            kept = within_capacity(indices, self.router.shape[0], self.capacity)
            indices = torch.where(kept, indices, self.router.shape[0])
        out = moe_routed(
            x, weights, indices, self.gate_up, self.down,
            activation=self.activation, recompute=self.recompute, backend=self.backend,
        )  # fmt: skip
        if self.shared_gate_up is not None and self.shared_down is not None:
            out = out + mlp(
                x, self.shared_gate_up, None, self.shared_down, activation=self.activation, recompute=self.recompute
            )  # fmt: skip
        return (out, logits, chosen) if return_routing else out

    def _check(self, x: Any) -> None:
        """What the router asks of x; `moe_routed` checks the rest."""
        require(isinstance(x, torch.Tensor), "a tensor x", TypeError, x=x)
        require_dense(x)
        router, floats = self.router, x.is_floating_point()
        fits = x.dim() > 0 and x.shape[-1] == router.shape[1] and x.device == router.device
        require(fits, "x (..., dim) on the device of the router (experts, dim)", x=x, router=router)
        if floats and not x.is_meta and torch.is_autocast_enabled(x.device.type):
            floats = (x.dtype == torch.float64) == (router.dtype == torch.float64)  # the only one that is not cast
        elif self.router_dtype is None:
            floats = x.dtype == router.dtype
        require(floats, "a floating x of the router's dtype", TypeError, x=x, router=router)

    def _apply(self, fn: Any, recurse: bool = True) -> MoE:
        bias = self.selection_bias
        super()._apply(fn, recurse)
        if bias is not None and self.selection_bias is not None and self.selection_bias.dtype != torch.float32:
            self.selection_bias = bias.to(self.selection_bias.device, torch.float32)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        if self.selection_bias is not None:  # with assign=True, a state of 16 bits
            self.selection_bias = self.selection_bias.float()

    def extra_repr(self) -> str:
        experts, _, dim = self.gate_up.shape
        return f"dim={dim}, hidden={self.down.shape[2]}, experts={experts}, top_k={self.top_k}"


class Linear(nn.Linear):
    """torch.nn.Linear with an activation, in one kernel; its state_dict is the same.

    A weight that is another kind of tensor (a quantised one) goes to PyTorch's operators; recompute and precision do
    not count then.

    Args:
        in_features, out_features, bias, device, dtype: as in torch.nn.Linear.
        activation, recompute, precision, backend: as in `adatom.linear`.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None, *, activation: str | None = None, recompute: bool = False,
        precision: str | None = None, backend: str | None = None,
    ) -> None:  # fmt: skip
        options_of(activation, False, precision)
        require_backend("linear", backend)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation = activation
        self.options: dict[str, Any] = {"recompute": recompute, "precision": precision, "backend": backend}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in_features) to (..., out_features)."""
        if is_traceable_wrapper_subclass(self.weight):  # a quantised one, which PyTorch's operators know
            require_operators(self.options["backend"], "for weights that are not plain tensors")
            return VALUES[self.activation or "none"](nn.functional.linear(input, self.weight, self.bias))
        return linear(input, self.weight, self.bias, activation=self.activation, **self.options)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"


def _plain(layer: nn.Module) -> bool:
    """Whether a layer is its weight and nothing else, so that who has the weight need not call it."""
    forward = type(layer).forward
    fits = forward is nn.Linear.forward or forward is Linear.forward and layer.activation in (None, "none")
    fits = fits and not is_traceable_wrapper_subclass(layer.weight)
    hooks = layer._forward_pre_hooks or layer._forward_hooks or layer._backward_pre_hooks or layer._backward_hooks
    return fits and "forward" not in layer.__dict__ and layer.bias is None and not hooks


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), the feed-forward block of Llama and its kin, whose parameter names it has.

    One call of `adatom.mlp` as long as its three layers are plain. If one has a bias, hooks (pruning, FSDP or tensor
    parallelism of its own), or is of another kind (an adapter, a quantised one), the layers are called one by one, and
    recompute and precision do not count.

    Args:
        features: of x and, unless out_features is given, of the result. hidden: features between.
        activation, recompute, precision, backend: as in `adatom.mlp`.
    """

    def __init__(
        self, features: int, hidden: int, out_features: int | None = None, *, activation: str = "silu",
        recompute: bool = False, precision: str | None = None, backend: str | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        options_of(activation, True, precision)
        require_backend("gated", backend)
        super().__init__()
        self.gate_proj = nn.Linear(features, hidden, False, device, dtype)
        self.up_proj = nn.Linear(features, hidden, False, device, dtype)
        self.down_proj = nn.Linear(hidden, features if out_features is None else out_features, False, device, dtype)
        options: dict[str, Any] = {"recompute": recompute, "precision": precision, "backend": backend}
        self.options = options | {"activation": activation}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., features) to (..., out_features)."""
        if _plain(self.gate_proj) and _plain(self.up_proj) and _plain(self.down_proj):
            return mlp(x, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight, **self.options)
        require_operators(self.options["backend"], "for layers that are not plain nn.Linear without bias")
        value = VALUES[self.options["activation"]](self.gate_proj(x))
        out: torch.Tensor = self.down_proj(value * self.up_proj(x))
        return out

    def extra_repr(self) -> str:
        return f"activation={self.options['activation']}"
