"""Which experts a token goes to: moe_route() and what goes with it, without host synchronisation."""

from __future__ import annotations

import inspect
import math
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from adatom.check import finite, require, require_dense, require_operators, whole
from adatom.ops.linear.problem import rows_of
from adatom.ops.moe.problem import inverse_of, plan
from adatom.ops.route import reference
from adatom.ops.route.op import flat, planned, route_fwd
from adatom.ops.route.problem import SCORINGS, Options, Problem, Tensor, problem, wide_dtype
from adatom.signature import PLAIN, recall, remember

_plans: dict[Any, Any] = {}


def moe_route(
    router_logits: Tensor, top_k: int, *, scoring: str = "softmax", renormalize: bool = True,
    selection_bias: Tensor | None = None, groups: tuple[int, int] | tuple[int, int, int] | None = None,
    scale: float | Tensor = 1.0, capacity: int | None = None, backend: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The weights and indices of the top_k experts of each token, as `moe_routed` takes them.

    Args:
        router_logits: (..., experts), floating.
        top_k: experts of a token, 1 to experts.
        scoring: "softmax" over all experts, or "sigmoid" of each: the scores, in float32 (float64 of float64).
        renormalize: divide a token's weights by their sum (of "sigmoid" and 1e-20, as DeepSeek-V3 does). With
            "softmax", that is the softmax of the chosen logits.
        selection_bias: (experts,), added to the scores for choosing only: weights are scores without it, and it gets no
            gradient.
        groups: (n, kept) or (n, kept, best): the experts are n groups of neighbours; a token chooses from the `kept`
            groups of which the `best` (default 2) largest scores have the largest sum.
        scale: multiplies the weights, after renormalizing; a number, or a floating tensor of shape ().
        capacity: an expert takes at most this many pairs of a token and an expert, the first in the order of tokens;
            the others are dropped: their index is `experts`, their weight 0. A token's other weights stay as they are.
        backend: one backend by name (see `adatom.explain`), with no fallback. Default: the fastest that fits.

    Returns:
        weights (..., top_k), float32 (float64 of float64), differentiable with respect to router_logits to any order;
        and indices (..., top_k), int64, the largest score first; of equals, the lower index. Without a selection bias
        and groups, logits are compared, which scores in float32 may round to equals. A logit of -inf is a score of 0.
        Weights are NaN where the scores of the chosen are: with "softmax", all of a token with a logit of NaN or +inf,
        or with none but -inf; and, renormalized, where all chosen logits are -inf, as a selection bias may choose them.

    Raises:
        ValueError, TypeError: what does not fit; the message prints it.
        NotImplementedError: the backend that was asked for does not take this problem; the message says why.

    Source: Shazeer et al., arXiv:1701.06538; capacity: Fedus et al., arXiv:2101.03961; the selection bias: Wang et al.,
    arXiv:2408.15664; groups: DeepSeek-V3, arXiv:2412.19437, and with best=1 DeepSeek-V2, arXiv:2405.04434.
    """
    plan = key = None
    if capacity is None and not isinstance(scale, Tensor):
        kinds = tuple(map(type, (top_k, scale, *(groups if isinstance(groups, (tuple, list)) else ()))))
        apart = tuple(groups) if isinstance(groups, list) else groups
        options = kinds, top_k, scoring, bool(renormalize), apart, scale, backend
        plan, key = recall(_plans, (router_logits, selection_bias), options)
    if plan is not None:
        weights, indices = plan(rows_of(router_logits), selection_bias)
        if router_logits.dim() == 2:
            return weights, indices
        shape = (*router_logits.shape[:-1], top_k)
        return weights.view(shape), indices.view(shape)
    require(backend is None or isinstance(backend, str), "a backend by name, or None", TypeError, backend=backend)
    given = _checked(router_logits, top_k, scoring, renormalize, selection_bias, groups, scale, capacity)
    logits, o = given.logits, given.options
    if key is not None and (selection_bias is None or selection_bias.dtype == wide_dtype(logits.dtype)):
        remember(_plans, key, planned(logits, o, backend))
    if _by_operators(logits):
        require_operators(backend, "in forward mode, under torch.func, for subclasses of tensors and on other devices")
        weights, indices = reference.forward(logits, given.bias, o)
    else:
        weights, indices = route_fwd(logits, given.bias, *flat(o), backend)
    shape = (*router_logits.shape[:-1], o.top_k)
    weights, indices = weights.view(shape), indices.view(shape)
    if isinstance(scale, Tensor):
        weights = weights * scale
    if capacity is not None:
        experts = router_logits.shape[-1]
        kept = within_capacity(indices, experts, capacity)
        indices, weights = torch.where(kept, indices, experts), torch.where(kept, weights, 0)
    return weights, indices


def _by_operators(logits: Tensor) -> bool:
    """Whether PyTorch's operators route: they carry tangents, and serve what an operator of our own does not."""
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return True
    return type(logits) not in PLAIN or logits.device.type not in ("cpu", "cuda", "meta")


class Given(NamedTuple):
    """What a launcher gets: logits (tokens, experts), the selection bias in their wide dtype, and the options."""

    logits: Tensor
    bias: Tensor | None
    options: Options


def _checked(
    router_logits: Any, top_k: Any, scoring: Any, renormalize: Any, selection_bias: Any, groups: Any, scale: Any,
    capacity: Any,
) -> Given:  # fmt: skip
    """The logits as a matrix, the bias, and the options, checked. A scale that is a tensor is not among them."""
    _check_logits(router_logits)
    experts = router_logits.shape[-1]
    check_routing(experts, top_k, scoring, groups, scale, capacity)
    bias = selection_bias
    if bias is not None:
        fits = isinstance(bias, Tensor) and bias.shape == (experts,) and bias.device == router_logits.device
        require(
            fits, "selection_bias (experts,), on the logits' device", selection_bias=bias, router_logits=router_logits
        )
        bias = bias.detach().to(wide_dtype(router_logits.dtype))
    n, kept, best = (0, 0, 0) if groups is None else (int(g) for g in (*groups, 2)[:3])
    by = 1.0 if isinstance(scale, Tensor) else float(scale)
    o = Options(int(top_k), scoring, bool(renormalize), (n, kept, best), by, bias is not None)
    return Given(rows_of(router_logits), bias, o)


def inputs_of(*args: Any, **kwargs: Any) -> Given:
    """What kernels get for `moe_route(*args, **kwargs)`."""
    bound = inspect.signature(moe_route).bind(*args, **kwargs)
    bound.apply_defaults()
    *rest, _ = bound.arguments.values()
    return _checked(*rest)


def problem_of(*args: Any, **kwargs: Any) -> tuple[Problem, str | None]:
    """The problem that `moe_route(*args, **kwargs)` poses, and `backend`."""
    given, bound = inputs_of(*args, **kwargs), inspect.signature(moe_route).bind(*args, **kwargs)
    return problem(given.logits, given.options), bound.arguments.get("backend")


def load_balancing_loss(
    router_logits: Tensor, indices: Tensor, *, scoring: str = "softmax", mask: Tensor | None = None
) -> Tensor:
    """experts * sum over experts of (pairs of a token with it / tokens) * (mean probability of it).

    top_k where all experts are chosen as often as each other, and more where they are not. Differentiable with respect
    to router_logits, through the probabilities. For several layers as one, concatenate their tokens.

    Args:
        router_logits: (..., experts). indices: (..., top_k), as from `moe_route`, without capacity.
        scoring: what makes probabilities of logits: "softmax", or "sigmoid", divided by their sum over experts.
        mask: (...) bool: the tokens that count, all of them by default; False on padding.

    Returns:
        A scalar, float32 (float64 of float64); 0 without tokens.

    Raises:
        ValueError, TypeError: what does not fit; the message prints it.

    Source: Fedus et al., arXiv:2101.03961, eq. 4 to 6; for top_k > 1 as Mixtral's.
    """
    _check_logits(router_logits)
    _check_scoring(scoring)
    lead, device = router_logits.shape[:-1], router_logits.device
    fits = isinstance(indices, Tensor) and _integers(indices) and indices.dim() > 0 and indices.shape[:-1] == lead
    require(
        fits and indices.device == device, "integer indices (..., top_k) of router_logits (..., experts), one device",
        router_logits=router_logits, indices=indices,
    )  # fmt: skip
    if mask is not None:
        fits = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == lead and mask.device == device
        require(
            fits, "a bool mask (...) of router_logits (..., experts), one device", router_logits=router_logits,
            mask=mask,
        )  # fmt: skip
        router_logits = torch.where(mask[..., None], router_logits, 0)  # NaN there must not reach a gradient
    probabilities = reference.scores_of(router_logits, scoring)
    if scoring == "sigmoid":
        probabilities = probabilities / (probabilities.sum(-1, keepdim=True) + reference.NONE)
    experts = router_logits.shape[-1]
    tokens = probabilities.new_full((), math.prod(lead))
    if mask is not None:
        indices = torch.where(mask[..., None], indices, experts)
        probabilities = torch.where(mask[..., None], probabilities, 0)
        tokens = mask.sum().to(probabilities.dtype)
    tokens = tokens.clamp(min=1)
    means = probabilities.reshape(-1, experts).sum(0) / tokens
    return experts * (expert_counts(indices, experts).to(means.dtype) / tokens * means).sum()


def expert_counts(indices: Tensor, experts: int) -> Tensor:
    """How often each expert is named, without host synchronisation; an index that names none is not counted.

    Args:
        indices: int32 or int64, of any shape, as from `moe_route`.
        experts: how many there are.

    Returns:
        (experts,), int32.

    Raises:
        TypeError, ValueError: indices are no integers; experts is no number of them.
    """
    fits = isinstance(indices, Tensor) and _integers(indices)
    require(fits, "a tensor of indices, int32 or int64", TypeError, indices=indices)
    require(whole(experts, 0), "a number of experts", experts=experts)
    return plan(indices, experts)[1].diff()


def _integers(indices: Tensor) -> bool:
    return indices.dtype in (torch.int32, torch.int64)


def check_routing(experts: int, top_k: Any, scoring: Any, groups: Any, scale: Any, capacity: Any) -> None:
    """Raise ValueError for options of `moe_route` that do not fit that many experts, or each other."""
    fits = whole(top_k, 1) and top_k <= experts
    require(fits, "top_k from 1 to the number of experts", top_k=top_k, experts=experts)
    _check_scoring(scoring)
    if groups is not None:
        _check_groups(experts, top_k, groups)
    one = scale.dim() == 0 and scale.is_floating_point() if isinstance(scale, Tensor) else finite(scale)
    require(one, "as scale a finite number, or a floating tensor ()", scale=scale)
    require(capacity is None or whole(capacity, 0), "a capacity of 0 or more pairs", capacity=capacity)


def _check_logits(router_logits: Any) -> None:
    if not isinstance(router_logits, Tensor) or not router_logits.is_floating_point():
        require(False, "floating router_logits (..., experts)", TypeError, router_logits=router_logits)
    require_dense(router_logits)
    fits = router_logits.dim() > 0 and router_logits.shape[-1] > 0
    require(fits, "router_logits (..., experts)", router_logits=router_logits)


def _check_scoring(scoring: Any) -> None:
    require(scoring in SCORINGS, f"a scoring among {', '.join(SCORINGS)}", scoring=scoring)


def _check_groups(experts: int, top_k: int, groups: Any) -> None:
    numbers = isinstance(groups, (tuple, list)) and len(groups) in (2, 3) and all(whole(g, 1) for g in groups)
    n, kept, _ = (*groups, 2)[:3] if numbers else (0, 0, 0)
    require(
        1 <= kept <= n and experts % n == 0,
        "groups (n, kept) or (n, kept, best): n a divisor of experts, kept from 1 to n, best from 1",
        groups=groups, experts=experts,
    )  # fmt: skip
    require(
        top_k <= kept * (experts // n), "no more experts for a token than its groups have", top_k=top_k, groups=groups,
        experts=experts,
    )  # fmt: skip


def within_capacity(indices: Tensor, experts: int, capacity: int) -> Tensor:
    """Whether each pair is among the first `capacity` of its expert in the order of tokens; bool, like indices."""
    order, offsets = plan(indices, experts)
    rank = inverse_of(order).view(indices.shape) - offsets[:-1].long()[indices]
    return rank < capacity
