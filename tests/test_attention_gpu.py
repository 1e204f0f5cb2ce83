"""Attention on a GPU: captured in CUDA graphs, and the same bits a thousand times beside other work."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import adatom

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
BF16, F32 = torch.bfloat16, torch.float32
TRIANGLE = ((1, 256, 4, 256, 32),) * 3


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return adatom.attention(q, k, v, causal=True)


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return adatom.attention(q, k, v, bias=bias)


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    ends = torch.arange(0, 1025, 256, device=q.device, dtype=torch.int32)
    return adatom.attention_varlen(q, k, v, ends, ends, causal=True)


CALLS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...], torch.dtype, bool]] = {
    # the call, the shapes of its tensors, their dtype, and whether it is differentiated twice
    "head_dim 64": (causal, ((2, 8, 1000, 64),) * 3, BF16, False),
    "head_dim 128, shared keys": (causal, ((2, 8, 1000, 128), *((2, 2, 1000, 128),) * 2), BF16, False),
    "head_dim 192": (causal, ((1, 4, 1000, 192),) * 3, BF16, False),
    "a bias": (biased, (*((2, 4, 1000, 64),) * 3, (4, 1000, 1000)), BF16, False),
    "a bias that rows share": (biased, (*TRIANGLE, (1, 1, 4, 256, 256)), BF16, False),
    "a bias that rows share, float32": (biased, (*TRIANGLE, (1, 1, 4, 256, 256)), F32, False),
    "packed": (packed, ((1024, 4, 128),) * 3, BF16, False),
    "decoding": (causal, ((4, 16, 1, 128), *((4, 2, 4000, 128),) * 2), BF16, False),
    "one tile, twice": (biased, (*((500, 8, 32, 16),) * 3, (500, 1, 1, 32)), F32, True),
    "twice": (biased, (*((1, 4, 300, 64),) * 3, (300, 300)), F32, True),
}


def inputs(name: str, device: torch.device) -> list[Tensor]:
    return [(torch.randn(shape) * 0.5).to(device, CALLS[name][2]).requires_grad_() for shape in CALLS[name][1]]


def results(name: str, given: list[Tensor]) -> list[Tensor]:
    """Out, its gradients and, if the call is differentiated twice, theirs."""
    call, _, _, twice = CALLS[name]
    out = call(*given)
    found = [out, *torch.autograd.grad(out, given, out.detach(), create_graph=twice)]
    if twice:
        found += torch.autograd.grad(sum(g.square().sum() for g in found[1:]), given)
    return [t.detach() for t in found]


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", CALLS)
def test_capture(cuda: torch.device, deterministic: None, name: str) -> None:
    """A captured step gives what an eager one gives, bit for bit, also of other numbers in the same places."""
    given = inputs(name, cuda)
    with torch.cuda.stream(torch.cuda.Stream()):
        results(name, given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = results(name, given)
    with torch.no_grad():
        for t in given:
            t.mul_(-0.5)
    graph.replay()
    want = results(name, given)
    torch.cuda.synchronize()
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_the_same_bits_a_thousand_times(cuda: torch.device, deterministic: None, name: str) -> None:
    """While another stream keeps the memory busy."""
    given, beside = inputs(name, cuda), torch.cuda.Stream()
    source = torch.zeros(2**27, device=cuda, dtype=torch.uint8)
    target, changed = torch.empty_like(source), torch.zeros((), device=cuda, dtype=torch.bool)
    want = results(name, given)
    torch.cuda.synchronize()
    for _ in range(1000):
        with torch.cuda.stream(beside):
            target.copy_(source)
        for one, other in zip(want, results(name, given), strict=True):
            changed |= (one != other).any()
    torch.cuda.synchronize()
    assert not changed.item()
