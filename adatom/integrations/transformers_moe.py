"""Hugging Face transformers (5.5 or newer): `experts_implementation="adatom"`.

    import adatom.integrations.transformers_moe
    adatom.integrations.transformers_moe.register()
    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation="adatom")
    adatom.integrations.transformers_moe.swap_routers(model)

The experts of models whose mixture goes through transformers' experts interface (Mixtral, Qwen3-MoE, DeepSeek-V3 and
others), with all gradients. Experts with biases, without a gate, with interleaved gates, a gate of their own, or a norm
behind them are refused. Routing stays the model's own but for the routers of those three that `swap_routers` finds.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Any

import torch
from torch.nn.functional import linear

from adatom.check import require
from adatom.ops.moe.api import moe_routed
from adatom.ops.route.api import moe_route

try:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
except ImportError as error:
    raise ImportError("adatom.integrations.transformers_moe needs the transformers package, 5.5 or newer") from error

NAME = "adatom"
_ACTIVATIONS = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "ReLU": "relu",
    "LinearActivation": "none",
}


def register() -> None:
    """Make `experts_implementation="adatom"` known to transformers. Calling it twice changes nothing."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def experts_forward(
    module: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What the experts interface calls: hidden_states (tokens, hidden), top_k_index and top_k_weights (tokens, top_k).

    An index of `num_experts` marks an expert of another rank: it adds nothing. Returns (tokens, hidden).
    """
    m: Any = module
    name = type(m).__name__
    for what, unfit in (
        ("a gate", not m.has_gate),
        ("no biases", m.has_bias),
        ("no norm behind the experts", getattr(m, "has_post_expert_norm", False)),
        ("the gate's rows before the others", not getattr(m, "is_concatenated", True)),
        ("the usual gate", type(m)._apply_gate.__module__ != ALL_EXPERTS_FUNCTIONS.__class__.__module__),
    ):
        require(not unfit, f"experts with {what}", NotImplementedError, module=name)
    activation = "silu" if m.act_fn is torch.nn.functional.silu else _ACTIVATIONS.get(type(m.act_fn).__name__)
    if activation is None:
        require(False, f"an activation among {', '.join(_ACTIVATIONS)}", NotImplementedError, act_fn=m.act_fn)
    gate_up, down = m.gate_up_proj, m.down_proj
    assert activation is not None
    if m.is_transposed:
        gate_up, down = gate_up.mT, down.mT
    return moe_routed(hidden_states, top_k_weights, top_k_index, gate_up, down, activation=activation)


def swap_routers(model: torch.nn.Module) -> int:
    """Let `adatom.moe_route` choose experts in the routers of a model: Mixtral's, Qwen3-MoE's and DeepSeek-V3's.

    In place: a router keeps its weights, its outputs and its class, but for a forward of one kernel after the product.
    Returns how many routers there were; others, and those that were swapped before, stay as they are. From transformers
    5.6 on, DeepSeek-V3's from 5.13 on: before, routers returned probabilities, or the block around them routed.
    """
    release = tuple(int(n) for n in version("transformers").split(".")[:2])
    require(release >= (5, 6), "transformers 5.6 or newer", NotImplementedError, transformers=release)
    swapped = 0
    for module in model.modules():
        kind: Any = type(module)
        known = kind.__module__.startswith("transformers.models.") and kind.__name__ in _ROUTERS
        if known and all(hasattr(module, name) for name in _ROUTERS[kind.__name__][1:]):
            module.__class__ = _routing(kind)
            swapped += 1
    return swapped


def _mixtral(m: Any, x: torch.Tensor) -> Any:
    logits = linear(x, m.weight)
    return logits, *moe_route(logits, m.top_k)


def _qwen3(m: Any, x: torch.Tensor) -> Any:
    logits = linear(x, m.weight)
    weights, indices = moe_route(logits, m.top_k, renormalize=m.norm_topk_prob)
    return logits, weights.to(logits.dtype), indices


def _deepseek(m: Any, x: torch.Tensor) -> Any:
    logits = linear(x.float(), m.weight.float())
    return logits, *moe_route(
        logits, m.top_k, scoring="sigmoid", renormalize=m.norm_topk_prob, selection_bias=m.e_score_correction_bias,
        groups=(m.num_group, m.topk_group), scale=m.routed_scaling_factor,
    )  # fmt: skip


# what routes instead, and what it reads of a router, which other releases may keep elsewhere
_ROUTERS: dict[str, tuple[Any, ...]] = {
    "MixtralTopKRouter": (_mixtral, "weight", "top_k", "hidden_dim"),
    "Qwen3MoeTopKRouter": (_qwen3, "weight", "top_k", "hidden_dim", "norm_topk_prob"),
    "DeepseekV3TopkRouter": (
        _deepseek, "weight", "top_k", "hidden_dim", "norm_topk_prob", "e_score_correction_bias", "num_group",
        "topk_group", "routed_scaling_factor",
    ),
}  # fmt: skip


@cache
def _routing(kind: Any) -> Any:
    """A subclass of a router's class, of another name, that routes by adatom."""
    route = _ROUTERS[kind.__name__][0]

    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        return route(self, hidden_states.reshape(-1, self.hidden_dim))

    def reduce(self: Any) -> Any:
        return _unpickled, (kind,), self.__dict__

    return type("Adatom" + kind.__name__, (kind,), {"forward": forward, "__reduce__": reduce})


def _unpickled(kind: Any) -> Any:
    """A router of `_routing(kind)` without its state: no module has that class by a name."""
    return object.__new__(_routing(kind))
