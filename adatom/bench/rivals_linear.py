"""The other implementations of linear layers with activations, and of gated ones, that adatom is timed against."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from adatom.bench.rivals import Bind, Call, Rival, Unfit
from adatom.ops.linear.cases import Case
from adatom.ops.linear.torch_linear import VALUES

Tensor = torch.Tensor

TENSORS = ("x", "weight", "bias")


def passes(group: str, case: Case) -> tuple[str, ...]:
    """What is timed."""
    return ("forward", "backward")


def _plain(name: str | None, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The layer by PyTorch's functions."""
    return VALUES[name or "none"](F.linear(x, weight, bias))


def _products(x: Tensor, gate: Tensor, up: Tensor | None) -> tuple[Tensor, ...]:
    """Those of a gated layer; one weight for both is multiplied once."""
    return F.linear(x, gate).chunk(2, -1) if up is None else (F.linear(x, gate), F.linear(x, up))


def _gated(name: str | None, x: Tensor, gate: Tensor, up: Tensor | None = None) -> Tensor:
    """The gated layer by PyTorch's functions."""
    z, y = _products(x, gate, up)
    return VALUES[name or "none"](z) * y


@lru_cache(maxsize=2)
def _compiled(gated: bool) -> Any:
    return torch.compile(_gated if gated else _plain, dynamic=False)


def _torch(compiled: bool) -> Bind:
    def bind(case: Case, given: dict[str, Any]) -> Call:
        if compiled:
            torch.compiler.reset()  # or the 8 variants that one function may have run out

        def call(*tensors: Tensor) -> Tensor:
            layer = _compiled(case.gated) if compiled else _gated if case.gated else _plain
            return layer(case.activation, *tensors)

        return call

    return bind


def _addmm(case: Case, given: dict[str, Any]) -> Call:
    """cuBLASLt's epilogues: relu, and gelu by tanh."""
    if not _has_epilogue(case, ""):
        raise Unfit("takes only a bias with relu or gelu_tanh")
    gelu = case.activation == "gelu_tanh"
    return lambda x, weight, bias: torch._addmm_activation(bias, x, weight.t(), use_gelu=gelu)


def _quack(case: Case, given: dict[str, Any]) -> Call:
    """Products with the activation in their epilogue; alone, it differentiates only those without one."""
    quack = importlib.import_module("quack.linear")
    if case.gated:
        gates = {"silu": "swiglu", "gelu_tanh": "geglu", "relu": "reglu"}
        if case.activation not in gates or case.apart:
            raise Unfit("silu, gelu_tanh or relu, and one weight for both products")
        gate = gates[case.activation]
        return lambda x, weight: quack.linear_gated_func(x, weight, gate, store_preact=False, concat_layout=True)[1]
    if case.activation in (None, "none"):
        return quack.linear_func
    names = {"silu": "silu", "relu": "relu", "gelu_tanh": "gelu_tanh_approx"}
    if case.activation not in names:
        raise Unfit(f"takes {', '.join(names)}")
    name = names[case.activation]
    return lambda x, weight, bias=None: quack.linear_act_func(x, weight, name, bias, store_preact=False)[1]


def _liger(case: Case, given: dict[str, Any]) -> Call:
    """The gate alone is its kernel; the products are PyTorch's."""
    gates = {"silu": ("swiglu", "LigerSiLUMulFunction"), "gelu_tanh": ("geglu", "LigerGELUMulFunction")}
    if not case.gated or case.activation not in gates:
        raise Unfit("gates of silu and gelu_tanh")
    module, name = gates[case.activation]
    gate = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name)

    def call(x: Tensor, w_gate: Tensor, w_up: Tensor | None = None) -> Tensor:
        return gate.apply(*_products(x, w_gate, w_up))

    return call


def _always(case: Case, group: str) -> bool:
    return True


def _has_epilogue(case: Case, group: str) -> bool:
    """Where cuBLASLt has an epilogue that does the whole layer."""
    return not case.gated and case.bias and case.activation in ("relu", "gelu_tanh")


RIVALS: tuple[Rival, ...] = (
    Rival("eager", (), _torch(False), _always),
    Rival("torch_compile", (), _torch(True), _always),
    Rival("addmm_activation", (), _addmm, _has_epilogue),
    Rival("quack", ("quack-kernels",), _quack, _always),
    Rival("liger", ("liger-kernel",), _liger, lambda case, group: case.gated),
)
