"""Has FlopCounterMode of torch.utils.flop_counter count adatom's operators: their matrix products, as it counts those
of PyTorch's attention and layers (masks save nothing). Its module takes longer to import than adatom, so a finder waits
for that import, and adds the formulas when the module has been executed.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_COUNTER = "torch.utils.flop_counter"

# Products of queries x keys x head_dim, and of queries x keys x head_dim_v, of each operator of attention.
_ATTENTION = {
    "attention_fwd": (1, 1),
    "attention": (1, 1),
    "attention_bwd": (3, 2),
    "attention_grad": (3, 2),
    "attention_bwd_bwd": (7, 5),
    "attention_jvp": (3, 2),
}


def _attention(name: str) -> Callable[..., int]:
    wide, wide_v = _ATTENTION[name]

    def formula(*args: Any, **_: Any) -> int:
        q, k, v, _bias, _sinks, _lens, cu_q, cu_k = args[:8]
        if cu_q is None:
            pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
        elif not isinstance(cu_q, FakeTensor) and cu_q.device.type != "meta":
            pairs = q.shape[1] * int((cu_q.long().diff() * cu_k.long().diff()).sum())
        else:  # as if all lengths were equal
            pairs = q.shape[1] * q.shape[0] * k.shape[0] // max(cu_q.shape[0] - 1, 1)
        return int(2 * pairs * (wide * q.shape[-1] + wide_v * v.shape[-1]))

    return formula


def _linear(x: Any, weight: Any, up: Any, *_: Any, **__: Any) -> int:
    return int(2 * x.numel() * (weight.shape[0] + (0 if up is None else up.shape[0])))


def _linear_bwd(*args: Any, **__: Any) -> int:
    activation, gated, kept, need_x, need_weight = args[4], args[5], args[8], args[10], args[11]
    # two gradients, and the product of the forward again, if an activation wants it and nothing of it was kept
    return (need_x + need_weight + (kept is None and (gated or activation != "none"))) * _linear(*args[:3])


def _linear_bwd_into(*args: Any, **__: Any) -> int:
    return _linear_bwd(*args[:11], True)


def _moe(x: Any, weights: Any, indices: Any, gate_up: Any, down: Any, *_: Any, **__: Any) -> int:
    return int(2 * indices.numel() * x.shape[-1] * (gate_up.shape[1] + down.shape[2]))


def _moe_bwd(*args: Any, **__: Any) -> int:
    x, indices, down, pre, wants = args[0], args[2], args[4], args[7], args[11:15]
    need_x, need_weights, need_gate_up, need_down = wants
    inner = need_x or need_weights or need_gate_up  # the gradient of what w_down multiplies
    products = 2 * (pre is None) + inner + 2 * need_x + 2 * need_gate_up + need_down
    return int(products * 2 * indices.numel() * x.shape[-1] * down.shape[2])


def _register(counter: Any) -> None:
    """Add what torch.utils.flop_counter has no formulas of yet."""
    found: dict[str, Callable[..., int]] = {
        **{name: _attention(name) for name in _ATTENTION},
        "linear_fwd": _linear,
        "linear_bwd": _linear_bwd,
        "linear_bwd_into": _linear_bwd_into,
        "moe_fwd": _moe,
        "moe_bwd": _moe_bwd,
        "moe_grouped": lambda x, weight, offsets, **_: 2 * x.numel() * weight.shape[1],
        "moe_outer": lambda a, b, offsets, **_: 2 * a.numel() * b.shape[1],
    }
    for name, formula in found.items():
        operator = getattr(torch.ops.adatom, name)
        if operator not in counter.flop_registry:
            counter.register_flop_formula(operator, get_raw=True)(formula)


class _Loader:
    """Executes a module as another loader does, then registers what it counts."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        _register(module)
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(_FINDER)


class _Finder:
    """Finds one module, as the other finders do."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """None for any other module."""
        if name != _COUNTER:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if not isinstance(finder, _Finder))
        spec = next((spec for spec in others if spec), None)
        if spec is not None:
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
        return spec


_FINDER: Any = _Finder()


def register() -> None:
    """From when its module is imported; at once if it is, or is being imported."""
    if _COUNTER in sys.modules:
        _register(importlib.import_module(_COUNTER))
    elif _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
