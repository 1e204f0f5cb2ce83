"""linear and gated on a GPU: derivatives of second order, accumulation, capture, and compiled code."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import adatom

pytestmark = pytest.mark.gpu
EAGER = {
    None: lambda z: z,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}


def tensors(cuda, dtype, *shapes):
    return [(torch.randn(s, device=cuda) * s[-1] ** -0.5).to(dtype).requires_grad_() for s in shapes]


def distance(got, want):
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def derivatives(f, given):
    """Gradients of a gradient penalty, which go through second derivatives."""
    out = f(*given)
    first = torch.autograd.grad(out.sum(), given, create_graph=True)
    loss = sum(g.float().square().sum() for g in first)
    return torch.autograd.grad(loss, given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_second_derivatives(cuda, activation, dtype):
    given = tensors(cuda, dtype, (192, 128), (256, 128), (256,))
    got = derivatives(lambda *a: adatom.linear(*a, activation=activation), given)
    wide = [t.detach().double().requires_grad_() for t in given]
    want = derivatives(lambda *a: EAGER[activation](F.linear(*a)), wide)
    theirs = derivatives(lambda *a: EAGER[activation](F.linear(*a)), given)
    for g, w, t in zip(got, want, theirs):
        assert distance(g, w) <= 2 * distance(t, w) + (1e-6 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weight_grad(cuda, dtype):
    x, w, b = tensors(cuda, dtype, (384, 136), (264, 136), (264,))
    buffer = torch.ones(264, 136, device=cuda)
    for _ in range(2):
        adatom.linear(x, w, b, activation="silu", weight_grad=buffer).sum().backward()
    assert w.grad is None
    wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
    F.silu(F.linear(*wide)).sum().backward()
    assert distance(buffer, 1 + 2 * wide[1].grad) < (5e-3 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize(
    "gated, rows, k, n", [(False, 512, 256, 512), (True, 512, 256, 512), (False, 4000, 2040, 2120)]
)
def test_capture(cuda, gated, rows, k, n):
    """A captured step gives what an eager one gives, bit for bit."""
    x, w = tensors(cuda, torch.bfloat16, (rows, k), (n, k))

    def step():
        out = adatom.swiglu(x, w) if gated else adatom.linear(x, w, activation="gelu")
        return [t.detach() for t in (out, *torch.autograd.grad(out, (x, w), torch.ones_like(out)))]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        want = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(g, e) for g, e in zip(got, want))


def test_backwards_on_two_streams(cuda):
    """Where dz is made beside the product that reads it, programs wait for each other, but for no other backward."""
    x, w = tensors(cuda, torch.bfloat16, (4000, 2040), (2120, 2040))
    dout = torch.randn(4000, 2120, device=cuda, dtype=torch.bfloat16)

    def step():
        return torch.autograd.grad(adatom.linear(x, w, activation="gelu"), (x, w), dout)

    want = step()
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream(priority=p) for p in (0, -1)], []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(step())
    torch.cuda.synchronize()
    assert all(torch.equal(g, e) for got in found for g, e in zip(got, want))


def test_mlp(cuda):
    x, gate, up, down = tensors(cuda, torch.bfloat16, (300, 128), (264, 128), (264, 128), (128, 264))
    out = adatom.mlp(x, gate, up, down)
    grads = torch.autograd.grad(out.sum(), (x, gate, up, down))
    wide = [t.detach().double().requires_grad_() for t in (x, gate, up, down)]
    expected = F.linear(F.silu(F.linear(wide[0], wide[1])) * F.linear(wide[0], wide[2]), wide[3])
    assert distance(out, expected) < 1e-2
    for g, w in zip(grads, torch.autograd.grad(expected.sum(), wide)):
        assert distance(g, w) < 1e-2


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_backward_that_frees_the_graph_needs_no_memory_for_dz(cuda, dtype, gated):
    x, w = tensors(cuda, dtype, (2048, 64), (2048, 64))
    f = adatom.swiglu if gated else lambda *a: adatom.linear(*a, activation="gelu")
    out = f(x, w)
    dout = torch.randn_like(out)
    kept = torch.autograd.grad(out, (x, w), dout, retain_graph=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    last = torch.autograd.grad(out, (x, w), dout)
    assert torch.cuda.max_memory_allocated() - before < 2048 * 2048 * dtype.itemsize // 2
    assert all(torch.equal(a, b) for a, b in zip(kept, last))
