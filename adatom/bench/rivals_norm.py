"""The other implementations of RMS norm and layer norm that adatom is timed against, each optional."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from adatom.bench.rivals import Bind, Call, Rival, Unfit
from adatom.ops.norm.cases import Case

Tensor = torch.Tensor

TENSORS = ("x", "weight", "bias", "residual")
_EPS = {False: 1e-6, True: 1e-5}


def passes(group: str, case: Case) -> tuple[str, ...]:
    """What is timed."""
    return ("forward", "backward")


def _names(case: Case) -> list[str]:
    has = {"x": True, "weight": case.weight, "bias": case.bias, "residual": case.residual}
    return [name for name in TENSORS if has[name]]


def _plain(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, centred: bool) -> Any:
    """The norm by PyTorch's functions."""
    h = x if residual is None else x + residual
    if centred:
        y = F.layer_norm(h, h.shape[-1:], weight, bias, _EPS[True])
    else:
        y = F.rms_norm(h, h.shape[-1:], weight, _EPS[False])
    return y if residual is None else (y, h)


def _formulas(x: Tensor, weight: Tensor | None, residual: Tensor | None) -> Any:
    """RMS norm as language models write it: in float32, rounded at the end."""
    h = x if residual is None else x + residual
    wide = h.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPS[False])
    y = (y if weight is None else y * weight.float()).to(x.dtype)
    return y if residual is None else (y, h)


@lru_cache(maxsize=1)
def _compiled() -> Any:
    return torch.compile(_plain, dynamic=False)


@lru_cache(maxsize=1)
def _compiled_formulas() -> Any:
    return torch.compile(_formulas, dynamic=False)


def _torch(compiled: bool, formulas: bool = False) -> Bind:
    def bind(case: Case, given: dict[str, Any]) -> Call:
        if formulas and (case.centred or case.bias):
            raise Unfit("RMS norm alone")
        if compiled:
            torch.compiler.reset()  # or the 8 variants that one function may have run out
        names = _names(case)

        def call(*tensors: Tensor) -> Any:
            by = dict(zip(names, tensors))
            if formulas:
                return _compiled_formulas()(by["x"], by.get("weight"), by.get("residual"))
            norm = _compiled() if compiled else _plain
            return norm(by["x"], by.get("weight"), by.get("bias"), by.get("residual"), case.centred)

        return call

    return bind


def _quack(case: Case, given: dict[str, Any]) -> Call:
    if case.centred or not case.weight:
        raise Unfit("RMS norm with a weight alone")
    rmsnorm = importlib.import_module("quack").rmsnorm

    def call(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Any:
        both = residual is not None  # the norm, and the sum of which it is
        return rmsnorm(x, weight, residual=residual, eps=_EPS[False], prenorm=both)

    return call


def _liger(case: Case, given: dict[str, Any]) -> Call:
    if case.residual or not case.weight or case.centred and not case.bias:
        raise Unfit("a weight, for layer norm a bias, and no residual")
    if case.centred:
        layer = importlib.import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction
        return lambda x, weight, bias: layer.apply(x, weight, bias, _EPS[True])
    rms = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    return lambda x, weight: rms.apply(x, weight, _EPS[False], 0.0, "llama", False)


def _always(case: Case, group: str) -> bool:
    return True


RIVALS: tuple[Rival, ...] = (
    Rival("eager", (), _torch(False), _always),
    Rival("torch_compile", (), _torch(True), _always),
    Rival("torch_compile_formulas", (), _torch(True, True), _always),
    Rival("quack", ("quack-kernels",), _quack, _always),
    Rival("liger", ("liger-kernel",), _liger, _always),
)
