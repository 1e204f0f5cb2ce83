"""Which problems each backend of routing takes: None, or the reason in words."""

from __future__ import annotations

from adatom.ops.linear.limits import without_triton
from adatom.ops.route.problem import Problem


def reference(p: Problem) -> str | None:
    """PyTorch's operators: everything."""
    return None


def torch_route(p: Problem) -> str | None:
    """The same, with another search: everything."""
    return None


def triton(p: Problem) -> str | None:
    """The Triton kernel: sm_80 and later, a token's experts in the registers of one warp."""
    n, _, best = p.options.groups
    if (why := without_triton(p.device, p.dtype)) is not None:
        return why
    if not p.tokens:
        return "does not take empty tensors"
    if p.experts > 1024 or p.options.top_k > 32:
        return f"takes up to 1024 experts and a top_k of up to 32; got {p.experts} and {p.options.top_k}"
    if n and (p.experts & (p.experts - 1) or n & (n - 1)):
        return f"takes groups of powers of two; got {p.experts} experts in {n}"
    if best > 8:
        return f"adds up to 8 scores of a group; got {best}"
    return None
