"""The other implementations of a mixture of experts that adatom is timed against."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from adatom.bench.rivals import Bind, Call, Rival, Unfit
from adatom.ops.moe.cases import Case

Tensor = torch.Tensor

TENSORS = ("x", "weights", "indices", "w_gate_up", "w_down")


def passes(group: str, case: Case) -> tuple[str, ...]:
    """What is timed; decoding has no backward."""
    return ("forward",) if "decode" in group else ("forward", "backward")


def _loop(x: Tensor, weights: Tensor, indices: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """Expert by expert, as eager models do: the host waits for the number of tokens of each. The experts' matrices are
    unbound once: the gradient of w[e] would be as large as w, and be added to the others' e by e."""
    out = torch.zeros_like(x)
    for e, (gate_up, down) in enumerate(zip(w_gate_up.unbind(), w_down.unbind())):
        token, place = torch.where(indices == e)
        gate, up = F.linear(x.index_select(0, token), gate_up).chunk(2, -1)
        y = F.linear(F.silu(gate) * up, down) * weights[token, place, None]
        out.index_add_(0, token, y.to(out.dtype))
    return out


def _grouped(x: Tensor, weights: Tensor, indices: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """Sort, grouped product, gate, grouped product, sum of the sorted rows: what PyTorch itself can do. No pair of
    these cases is dropped."""
    keys, order = torch.sort(indices.reshape(-1))
    experts = torch.arange(w_down.shape[0], device=x.device)
    offsets = torch.searchsorted(keys, experts, right=True, out_int32=True)
    token = order // indices.shape[1]
    gate, up = torch._grouped_mm(x[token], w_gate_up.mT, offs=offsets).chunk(2, -1)
    y = torch._grouped_mm(F.silu(gate) * up, w_down.mT, offs=offsets)
    y = y * weights.reshape(-1, 1)[order].to(y.dtype)
    return torch.zeros_like(x).index_add(0, token, y)


@lru_cache(maxsize=1)
def _compiled() -> Any:
    return torch.compile(_grouped, dynamic=False)


def _refuse(case: Case) -> None:
    """What none of the others takes."""
    if case.activation != "silu" or case.routing in ("dropped", "none") or len(case.lead) != 1:
        raise Unfit("silu, a matrix of tokens, and no pair dropped")


def _torch(how: str) -> Bind:
    def bind(case: Case, given: dict[str, Any]) -> Call:
        _refuse(case)
        if how == "loop":
            return _loop
        if case.dtype != torch.bfloat16:
            raise Unfit("the grouped product is PyTorch's own kernel in bfloat16 alone")
        if how == "compiled":
            torch.compiler.reset()  # or the 8 variants that one function may have run out
            return lambda *tensors: _compiled()(*tensors)
        return _grouped

    return bind


def _sonic(case: Case, given: dict[str, Any]) -> Call:
    """SonicMoE, from ready weights and indices; these come in its form beforehand. It reads the experts as they lie,
    the gate's rows first."""
    _refuse(case)
    routed = importlib.import_module("sonicmoe.functional").moe_general_routing_inputs
    swiglu = importlib.import_module("sonicmoe.enums").ActivationType.SWIGLU
    tokens, top_k = given["indices"].shape
    token = torch.arange(tokens, device=given["x"].device, dtype=torch.int32).repeat_interleave(top_k)
    expert = given["indices"].reshape(-1).int()

    def call(x: Tensor, weights: Tensor, indices: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
        stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
        pairs, inference = (weights.reshape(-1), token, expert), not torch.is_grad_enabled()
        experts = w_gate_up.permute(1, 2, 0), None, w_down.permute(1, 2, 0), None, len(w_down)
        return routed(x, *pairs, *experts, stream, swiglu, inference, concat_layout=True)[0]

    return call


def _liger(case: Case, given: dict[str, Any]) -> Call:
    """From ready weights and indices; these come in 32 bits beforehand."""
    _refuse(case)
    layer = importlib.import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction
    expert = given["indices"].int()

    def call(x: Tensor, weights: Tensor, indices: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
        return layer.apply(x, w_gate_up, w_down, expert, weights)

    return call


def _always(case: Case, group: str) -> bool:
    return True


RIVALS: tuple[Rival, ...] = (
    Rival("eager", (), _torch("loop"), _always),
    Rival("grouped_mm", (), _torch("grouped"), _always),
    Rival("grouped_mm_compiled", (), _torch("compiled"), _always),
    Rival("sonicmoe", ("sonic-moe",), _sonic, _always),
    Rival("liger", ("liger-kernel",), _liger, _always),
)
