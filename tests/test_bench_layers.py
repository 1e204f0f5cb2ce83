"""The optional rivals of linear, gated and moe are asked what adatom is: stand-ins with their interfaces compute it."""

from __future__ import annotations

import enum
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import adatom
from adatom.bench import rivals_linear, rivals_moe
from adatom.bench.rivals import Unfit
from adatom.ops.linear import cases as linear_cases
from adatom.ops.moe import cases as moe_cases

Tensor = torch.Tensor
ACTIVATIONS = {"relu": F.relu, "silu": F.silu, "gelu_tanh_approx": lambda z: F.gelu(z, approximate="tanh")}
GATES = {"swiglu": F.silu, "reglu": F.relu, "geglu": ACTIVATIONS["gelu_tanh_approx"]}


def bind(module: Any, name: str) -> Any:
    return next(rival.bind for rival in module.RIVALS if rival.name == name)


def gated(x: Tensor, weight: Tensor, gate: str, store_preact: bool, concat_layout: bool) -> tuple[None, Tensor]:
    assert concat_layout and not store_preact
    a, b = F.linear(x, weight).chunk(2, -1)
    return None, GATES[gate](a) * b


def product(function: Any) -> Any:
    return SimpleNamespace(apply=lambda a, b: function(a) * b)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules with the functions that the rivals are called by, as their releases document them."""

    def act(x: Tensor, w: Tensor, name: str, bias: Tensor | None, store_preact: bool) -> tuple[None, Tensor]:
        return None, ACTIVATIONS[name](F.linear(x, w, bias))

    swiglu = enum.Enum("ActivationType", {"SWIGLU": "swiglu"})

    def sonic(
        x: Tensor, scores: Tensor, token: Tensor, expert: Tensor, w1: Tensor, b1: None, w2: Tensor, b2: None,
        experts: int, stream: int, activation: Any, inference: bool, concat_layout: bool,
    ) -> tuple[Tensor, None]:  # fmt: skip
        assert concat_layout and activation is swiglu.SWIGLU and experts == w2.shape[2]
        assert w1.stride()[1] == w2.stride()[1] == 1 and token.dtype == expert.dtype == torch.int32
        assert (token.diff() >= 0).all() and inference != torch.is_grad_enabled()
        out = torch.zeros_like(x, dtype=torch.float32)
        for s, t, e in zip(scores, token, expert):
            a, b = (w1[..., e] @ x[t]).chunk(2)
            out[t] += s * (w2[..., e] @ (F.silu(a) * b))
        return out.to(x.dtype), None

    def liger_moe(x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        assert indices.dtype == torch.int32
        return adatom.moe_routed(x, weights, indices, gate_up, down)

    quack = SimpleNamespace(linear_func=F.linear, linear_act_func=act, linear_gated_func=gated)
    for name, module in {
        "quack.linear": quack,
        "sonicmoe.functional": SimpleNamespace(moe_general_routing_inputs=sonic),
        "sonicmoe.enums": SimpleNamespace(ActivationType=swiglu),
        "liger_kernel.ops.fused_moe": SimpleNamespace(LigerFusedMoEFunction=SimpleNamespace(apply=liger_moe)),
        "liger_kernel.ops.swiglu": SimpleNamespace(LigerSiLUMulFunction=product(F.silu)),
        "liger_kernel.ops.geglu": SimpleNamespace(LigerGELUMulFunction=product(GATES["geglu"])),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)


def ours(case: linear_cases.Case, given: dict[str, Any]) -> Tensor:
    if not case.gated:
        return adatom.linear(**given)
    up = () if given.get("w_up") is None else (given["w_up"],)
    return adatom.mlp(given["x"], given["w_gate"], *(up or (None,)), eye(case), activation=case.activation or "none")


def eye(case: linear_cases.Case) -> Tensor:
    return torch.eye(case.out_features, dtype=case.dtype)


@pytest.mark.parametrize("name", ["quack", "liger"])
@pytest.mark.parametrize("apart", [None, False, True], ids=["plain", "joined", "apart"])
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
def test_layers(modules: None, name: str, apart: bool | None, activation: str | None) -> None:
    gated = apart is not None
    case = linear_cases.Case(
        "x", (5,), 8, 6, torch.float32, activation, bias=not gated, apart=bool(apart), gated=gated
    )  # fmt: skip
    given = linear_cases.make(case, torch.device("cpu"))
    tensors = [given[n] for n in ("x", "w_gate", "w_up", "weight", "bias") if given.get(n) is not None]
    takes = {"quack": (None, "relu", "gelu_tanh", "silu"), "liger": ("gelu_tanh", "silu")}[name]
    if (activation is None if gated else name == "liger") or activation not in takes or name == "quack" and apart:
        with pytest.raises(Unfit):
            bind(rivals_linear, name)(case, given)
        return
    got = bind(rivals_linear, name)(case, given)(*tensors)
    torch.testing.assert_close(got, ours(case, given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["sonicmoe", "liger"])
def test_experts(modules: None, name: str) -> None:
    case = next(c for c in moe_cases.SMALL if c.name == "bf16 silu")
    given = moe_cases.make(case, "cpu")
    call, tensors = bind(rivals_moe, name)(case, given), [given[n] for n in rivals_moe.TENSORS]
    tensors[rivals_moe.TENSORS.index("indices")] = None  # what it takes of them was made before the clock runs
    with torch.no_grad():
        got = call(*tensors)
    torch.testing.assert_close(got, adatom.moe_routed(**given), rtol=3e-2, atol=3e-2)
    with pytest.raises(Unfit):
        bind(rivals_moe, name)(case._replace(activation="gelu"), given)
