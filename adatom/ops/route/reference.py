"""Routing in plain PyTorch: the judge, and the documentation.

Of a token's logits l, in float32 (float64 of float64),

    scores s = softmax(l) or sigmoid(l)          choice c = s + selection_bias

and the experts with the top_k largest c are chosen, the lower number first among equals; without a selection bias and
groups, those with the largest l, which order as s do but are not rounded. With groups (n, kept, best), the experts are
n groups of neighbours, and all but the `kept` groups with the largest sums of their `best` largest c are left out. The
weights are scale times the s of the chosen; renormalized, these divided by their sum: with softmax the softmax of their
l, with sigmoid s / (sum + 1e-20).
"""

from __future__ import annotations

import torch

from adatom.ops.route.problem import Options, Tensor, wide_dtype

NONE = 1e-20  # keeps sums of scores that are all 0 from dividing 0 by 0


def scores_of(logits: Tensor, scoring: str) -> Tensor:
    """The score of each expert, in float32 or float64."""
    wide = logits.to(wide_dtype(logits.dtype))
    return wide.sigmoid() if scoring == "sigmoid" else torch.softmax(wide, -1)


def largest(x: Tensor, n: int) -> Tensor:
    """Where the n largest of each row are, the first of equals first; NaN counts as the largest."""
    return x.sort(stable=True, dim=-1, descending=True).indices[..., :n]


def _within_groups(choice: Tensor, groups: tuple[int, int, int]) -> Tensor:
    """-inf for the experts of all but the chosen groups, where nothing is as low as that: nor do groups with a barred
    expert, or their sums, count as little as those with none but such."""
    n, kept, best = groups
    size = choice.shape[-1] // n
    apart = choice.unflatten(-1, (n, size)).clamp(min=torch.finfo(choice.dtype).min / size)
    sums = apart.topk(min(best, size), dim=-1).values.sum(-1)
    chosen = torch.zeros_like(sums, dtype=torch.bool).scatter_(-1, largest(sums, kept), True)
    return torch.where(chosen[..., None], apart, -torch.inf).flatten(-2)


def choice(logits: Tensor, selection_bias: Tensor | None, o: Options) -> Tensor:
    """What the chosen experts have the largest of, in float32 or float64."""
    logits = logits.detach()
    if o.by_logits:
        return logits.to(wide_dtype(logits.dtype))
    found = scores_of(logits, o.scoring)
    if selection_bias is not None:
        found = found + selection_bias.detach().to(found.dtype)
    return _within_groups(found, o.groups) if o.groups[0] else found


def weights_of(logits: Tensor, indices: Tensor, o: Options) -> Tensor:
    """The weights of the experts that were chosen, differentiable with respect to logits to any order."""
    scores = scores_of(logits, o.scoring)
    weights = scores.gather(-1, indices)
    if o.renormalize and o.scoring == "softmax":  # not by their sum, which may be as small as nothing
        chosen = logits.gather(-1, indices).to(scores.dtype)
        weights = torch.softmax(chosen + weights.detach().clamp(max=0), -1)  # NaN where the scores are
    elif o.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + NONE)
    return weights if o.scale == 1.0 else weights * o.scale


def forward(logits: Tensor, selection_bias: Tensor | None, o: Options) -> tuple[Tensor, Tensor]:
    """weights (tokens, top_k), float32 or float64, and indices (tokens, top_k), int64, the largest choice first.

    logits (tokens, experts), selection_bias (experts,) or None.
    """
    indices = largest(choice(logits, selection_bias, o), o.top_k).contiguous()
    return weights_of(logits, indices, o), indices


def backward(logits: Tensor, indices: Tensor, dweights: Tensor, o: Options) -> tuple[Tensor]:
    """dlogits in their dtype; differentiable in turn with respect to logits and dweights.

    With v the gradients of the weights w, a softmax gives w (v - sum w v) to the logits that it is of, all or the
    chosen; a sigmoid s gives s (1 - s) v, where v becomes (v - sum w v) / S first if s was divided by their sum S.
    """
    wide, v = logits.to(wide_dtype(logits.dtype)), dweights * o.scale
    zeros = torch.zeros_like(wide)
    if o.scoring == "softmax" and not o.renormalize:
        w, v = torch.softmax(wide, -1), zeros.scatter(-1, indices, v)
        return ((w * (v - (w * v).sum(-1, keepdim=True))).to(logits.dtype),)
    if o.scoring == "softmax":
        w = weights_of(logits, indices, o._replace(scale=1.0))
        chosen = w * (v - (w * v).sum(-1, keepdim=True))
    else:
        s = wide.gather(-1, indices).sigmoid()
        if o.renormalize:
            total = s.sum(-1, keepdim=True) + NONE
            v = (v - (s / total * v).sum(-1, keepdim=True)) / total
        chosen = s * (1 - s) * v
    return (zeros.scatter(-1, indices, chosen).to(logits.dtype),)
