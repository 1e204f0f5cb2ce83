"""Every op on a GPU that is not the current one gives what it gives on the current one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import adatom

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
BF16, F32 = torch.bfloat16, torch.float32


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    ends = torch.tensor([0, 100, 100, 512], device=q.device, dtype=torch.int32)
    return adatom.attention_varlen(q, k, v, ends, ends, causal=True)


def experts(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return adatom.moe(x, logits, gate_up, down, top_k=2)


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return adatom.attention(q, k, v, bias=bias)


HEADS = ((2, 8, 1024, 64),) * 3
CALLS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...], torch.dtype, bool]] = {
    # the call, the shapes of its tensors, their dtype, and whether it is differentiated twice
    "attention": (adatom.attention, HEADS, BF16, False),
    "attention, head_dim 192": (adatom.attention, ((1, 8, 1024, 192),) * 3, BF16, False),
    "attention, twice": (adatom.attention, ((1, 4, 200, 32),) * 3, F32, True),
    "attention, a bias": (biased, (*HEADS, (8, 1024, 1024)), BF16, False),
    "attention, one tile": (biased, (*((300, 8, 32, 16),) * 3, (300, 1, 1, 32)), F32, True),
    "attention, packed": (packed, ((512, 4, 128),) * 3, BF16, False),
    "linear": (lambda x, w, b: adatom.linear(x, w, b, activation="gelu"), ((512, 256), (384, 256), (384,)), BF16, True),
    "swiglu": (adatom.swiglu, ((512, 256), (384, 256), (384, 256)), BF16, True),
    "rms_norm": (adatom.rms_norm, ((512, 1024), (1024,)), BF16, True),
    "layer_norm, long rows": (adatom.layer_norm, ((300, 32768), (32768,), (32768,)), BF16, False),
    "moe": (experts, ((1024, 256), (1024, 8), (8, 512, 256), (8, 256, 256)), BF16, True),
    "moe, one token": (experts, ((1, 256), (1, 8), (8, 512, 256), (8, 256, 256)), BF16, False),
}


def results(call: Callable[..., Tensor], given: list[Tensor], twice: bool) -> list[Tensor]:
    given = [t.detach().requires_grad_() for t in given]
    out = call(*given)
    found = [out, *torch.autograd.grad(out, given, out.detach(), create_graph=twice)]
    if twice:
        found += torch.autograd.grad(sum(g.float().square().sum() for g in found[1:]), given, allow_unused=True)
    with torch.no_grad():
        found.append(call(*given))
    return found


@pytest.mark.parametrize("name", CALLS)
def test_a_device_that_is_not_current(name: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    call, shapes, dtype, twice = CALLS[name]
    given = [torch.randn(shape).to("cuda:0", dtype) * 0.5 for shape in shapes]
    first = results(call, given, twice)
    again = results(call, [t.to("cuda:1") for t in given], twice)
    assert torch.cuda.current_device() == 0
    for one, other in zip(first, again, strict=True):
        assert other.device == torch.device("cuda:1") and other.isfinite().all()
        one, other = one.detach().double(), other.detach().double().to(one.device)
        assert (one - other).norm() <= 1e-3 * one.norm()  # additions to dQ come in any order
