"""adatom: GPU kernels for PyTorch that can prove they are right, and that can be differentiated twice."""

import importlib
from typing import Any

from adatom import flops as _flops
from adatom.ops.attention.api import attention, attention_varlen
from adatom.ops.gated.api import geglu, mlp, swiglu
from adatom.ops.linear.api import linear
from adatom.ops.moe.api import moe, moe_routed
from adatom.ops.norm.api import layer_norm, rms_norm
from adatom.ops.route.api import expert_counts, load_balancing_loss, moe_route
from adatom.registry import explain

__version__ = "0.1.0"
__all__ = [
    "attention",
    "attention_varlen",
    "expert_counts",
    "explain",
    "geglu",
    "layer_norm",
    "linear",
    "load_balancing_loss",
    "mlp",
    "moe",
    "moe_route",
    "moe_routed",
    "rms_norm",
    "swiglu",
]

_flops.register()


def __getattr__(name: str) -> Any:
    """`adatom.nn`, `adatom.compat` and `adatom.integrations`, imported when they are first asked for."""
    if name in ("nn", "compat", "integrations"):
        return importlib.import_module(f"adatom.{name}")
    raise AttributeError(f"module 'adatom' has no attribute {name!r}")
