"""The other ways to route that adatom is timed against: what model code does with PyTorch's operators."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from adatom.bench.rivals import Bind, Call, Rival
from adatom.ops.route.cases import Case

Tensor = torch.Tensor

TENSORS = ("router_logits", "selection_bias")


def passes(group: str, case: Case) -> tuple[str, ...]:
    """What is timed."""
    return ("forward",)


def _plain(logits: Tensor, bias: Tensor | None, case: Case) -> tuple[Tensor, Tensor]:
    """As transformers writes it for the models of the cases."""
    wide = logits.float()
    scores = wide.sigmoid() if case.scoring == "sigmoid" else wide.softmax(-1)
    choice = scores if bias is None else scores + bias
    if case.groups is not None:
        n, kept, best = (*case.groups, 2)[:3]
        sums = choice.unflatten(-1, (n, -1)).topk(best, -1)[0].sum(-1)
        mask = torch.zeros_like(sums).scatter_(-1, sums.topk(kept, -1, sorted=False)[1], 1)
        mask = mask.unsqueeze(-1).expand(-1, n, choice.shape[-1] // n).flatten(-2)
        choice = choice.masked_fill(~mask.bool(), -torch.inf)
    indices = choice.topk(case.top_k, -1)[1]
    weights = scores.gather(-1, indices)
    if case.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return (weights if case.scale == 1.0 else weights * case.scale), indices


@lru_cache(maxsize=1)
def _compiled() -> Any:
    return torch.compile(_plain, dynamic=False)


def _torch(compiled: bool) -> Bind:
    def bind(case: Case, given: dict[str, Any]) -> Call:
        if compiled:
            torch.compiler.reset()  # or the 8 variants that one function may have run out
        route = _compiled() if compiled else _plain

        def call(logits: Tensor, bias: Tensor | None = None) -> Tensor:
            weights: Tensor = route(logits, bias, case)[0]
            return weights

        return call

    return bind


def _always(case: Case, group: str) -> bool:
    return True


RIVALS: tuple[Rival, ...] = (
    Rival("eager", (), _torch(False), _always),
    Rival("torch_compile", (), _torch(True), _always),
)
