"""Hugging Face transformers (5.5 or newer): `attn_implementation="adatom"`.

    import adatom.integrations.transformers
    adatom.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="adatom")

Causal and bidirectional models, padding, sliding windows, a cache, softcaps, sinks and position biases, with all
gradients. T5 needs 5.17: before, its attention could not be replaced. Attention dropout is refused: set it to 0 in the
config, or call model.eval(). Attention weights are not returned; who asks for them is warned once.

A mask of every query and key is built only where it must be. What the two functions registered here pass each other:

    None                       the module's own structure: causal if the module is causal
    uint8 (batch, 1, 1, keys)  causal, among the keys marked 1 (padding)
    int8 (batch, 1, 1, keys)   causal and in the layer's sliding window, among the keys marked 1; one 1: all
    bool, float                everything said, as for sdpa: True attends, or added to the scores

A query with nothing to attend to, as on left padding, gives 0.
"""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

import torch
import torch.nn.functional as F

from adatom.check import require
from adatom.ops.attention.api import attention

try:
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
except ImportError as error:
    raise ImportError("adatom.integrations.transformers needs the transformers package, 5.5 or newer") from error

NAME = "adatom"
_CAUSAL, _WINDOW = torch.uint8, torch.int8
_log = transformers.utils.logging.get_logger(__name__)


def register() -> None:
    """Make `attn_implementation="adatom"` known to transformers. Calling it twice changes nothing.

    Besides the attention and mask functions, this adds one check to PreTrainedModel: a model whose code does not route
    attention through AttentionInterface is refused, because it would take adatom's masks for its own; and one that
    supports nothing but eager attention (no `_supports_sdpa` and the like), because without padding it would see more
    keys than it should, or fewer: its layers do not say whether they are causal.

    Raises ImportError for transformers before 5.5, whose masks are made differently.
    """
    if "q_length" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        raise ImportError(
            f"adatom.integrations.transformers needs transformers 5.5 or newer; got {transformers.__version__}"
        )
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    checked = PreTrainedModel.get_correct_attn_implementation
    if not hasattr(checked, "_adatom"):

        def get_correct_attn_implementation(self: Any, requested_attention: str | None, *args: Any, **kw: Any) -> str:
            if requested_attention == NAME and not _routes(type(self)):
                raise ValueError(
                    f"{type(self).__name__} of transformers {transformers.__version__} has attention of its own that "
                    f'no attn_implementation replaces, or supports eager attention alone: "{NAME}" cannot run it'
                )
            return checked(self, requested_attention, *args, **kw)

        get_correct_attn_implementation._adatom = True  # type: ignore[attr-defined]
        PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What AttentionInterface calls.

    Args:
        query: (batch, heads, queries, head_dim). key, value: (batch, kv_heads, keys, head_dim).
        attention_mask: one of those in the module's docstring.
        dropout: must be 0. s_aux: sinks (heads,). position_bias: (1 or batch, heads, queries, keys), may require grad.

    Returns:
        (out (batch, queries, heads, head_dim), None).
    """
    require(
        not dropout,
        "no attention dropout: it is not implemented; set it to 0 in the model's config, or call model.eval()",
        NotImplementedError,
        dropout=dropout,
    )
    if kwargs.get("output_attentions"):
        _log.warning_once('adatom returns no attention weights; attn_implementation="eager" does')
    for name in ("cache", "block_indices", "sinks"):  # paged caches, block-sparse attention, sinks for each query
        require(kwargs.get(name) is None, f"no {name}: not supported by adatom", NotImplementedError)
    mask, seqlen_k, window = attention_mask, key.shape[2], None
    causal = mask is None and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if mask is not None and mask.dtype in (_CAUSAL, _WINDOW):
        if mask.shape[2] != 1:
            require(
                False,
                "the mask made for a causal attention to arrive there unchanged",
                attention_mask=mask,
                query=query,
                module=type(module).__name__,
            )
        causal = True
        if mask.dtype == _WINDOW:
            window = (_window(module, sliding_window) - 1, None)
        mask = None if mask.shape[3] == 1 < seqlen_k else mask.bool()
    mask = None if mask is None else mask[..., :seqlen_k]
    out = attention(
        query,
        key,
        value,
        bias=_bias(query, mask, None if position_bias is None else position_bias[..., :seqlen_k]),
        causal=causal,
        window=window,
        softcap=softcap,
        sinks=s_aux,
        scale=scaling,
    )
    assert isinstance(out, torch.Tensor)
    return out.transpose(1, 2).contiguous(), None


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """What AttentionMaskInterface calls: the mask for one kind of layer, as in the module's docstring.

    Args:
        attention_mask: (batch, tokens seen so far) bool, False on padding.
        q_offset, kv_offset: the positions of the first query and key; a tensor for caches of fixed size.
    """
    plain_padding = attention_mask is None or attention_mask.dim() == 2
    if plain_padding and allow_is_bidirectional_skip and mask_function is masking_utils.bidirectional_mask_function:
        padding = _padding(attention_mask, kv_length, kv_offset)
        return None if padding is None else padding.bool()
    # adatom aligns the last query with the last key; a cache of fixed size has unused keys behind it.
    aligned = not isinstance(q_offset, torch.Tensor) and q_offset + q_length == kv_offset + kv_length
    if plain_padding and allow_is_causal_skip and aligned:
        if local_size is None or local_size > kv_length:
            padding = _padding(attention_mask, kv_length, kv_offset)
            return None if padding is None else padding.to(_CAUSAL)
        config = kwargs.get("config")
        if local_size == getattr(config, "sliding_window", None) != getattr(config, "attention_chunk_size", None):
            padding = _padding(attention_mask, kv_length, kv_offset)
            return torch.ones(1, 1, 1, 1, dtype=_WINDOW, device=device) if padding is None else padding.to(_WINDOW)
    return masking_utils.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        device=device,
        **kwargs,
    )


def _padding(attention_mask: torch.Tensor | None, kv_length: int, kv_offset: int) -> torch.Tensor | None:
    """bool (batch, 1, 1, kv_length), False on padding; None if there is none (known only outside of tracing)."""
    if attention_mask is None:
        return None
    missing = kv_offset + kv_length - attention_mask.shape[1]
    keys = F.pad(attention_mask, (0, max(missing, 0)))[:, kv_offset : kv_offset + kv_length].bool()
    tracing = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return keys[:, None, None] if tracing or not keys.all() else None


def _window(module: torch.nn.Module, sliding_window: int | None) -> int:
    """Keys a query of this layer sees: what the layer passes, or what its config says."""
    size = sliding_window or getattr(getattr(module, "config", None), "sliding_window", None)
    require(size is not None, "a sliding window size from the layer or its config", module=type(module).__name__)
    return int(size)  # type: ignore[arg-type]


def _bias(query: torch.Tensor, mask: torch.Tensor | None, position_bias: torch.Tensor | None) -> torch.Tensor | None:
    """The mask (bool, or float to add) and the position bias as one."""
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(torch.float64 if query.dtype == torch.float64 else query.dtype)
    if position_bias is None or mask is None:
        return mask if position_bias is None else position_bias
    if mask.dtype == torch.bool:
        return torch.where(mask, position_bias, -torch.inf)
    return position_bias + mask


def _routes(model: type) -> bool:
    """Whether the code of this model hands its attention to AttentionInterface, as far as its source tells, and it says
    that it supports other implementations than eager."""
    try:
        source = inspect.getsource(sys.modules[model.__module__])
    except (OSError, TypeError, KeyError):  # written at a prompt
        return True
    has_attention = re.search(r"^class \w*Attention\w*\(.*Module\)", source, re.MULTILINE)
    routes = "attention_interface" in source or "ALL_ATTENTION_FUNCTIONS" in source
    others = ("sdpa", "flash_attn", "flex_attn", "attention_backend")
    return not has_attention or routes and any(getattr(model, f"_supports_{name}", False) for name in others)
