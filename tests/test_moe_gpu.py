"""moe's kernels on a GPU: the order of many pairs, capture, and derivatives of second order."""

from __future__ import annotations

import pytest
import torch

import adatom
from adatom.ops.moe.problem import inverse_of, plan

pytestmark = pytest.mark.gpu


def tensors(cuda, dtype, tokens=300, hidden=128, wide=64, experts=16, top_k=4):
    """x, weights, indices, w_gate_up, w_down; all but indices require grad, some pairs are dropped."""
    shapes = ((tokens, hidden), (experts, 2 * wide, hidden), (experts, hidden, wide))
    x, gate_up, down = ((torch.randn(s, device=cuda) * s[-1] ** -0.5).to(dtype).requires_grad_() for s in shapes)
    weights = torch.rand(tokens, top_k, device=cuda).requires_grad_()
    indices = torch.rand(tokens, experts, device=cuda).topk(top_k).indices
    indices[::7, 1] = -1
    return x, weights, indices, gate_up, down


@pytest.mark.parametrize("experts", [1, 31, 32, 512, 4095])
@pytest.mark.parametrize("tokens", [1, 511, 512, 513, 40_000])
def test_order(cuda, tokens, experts):
    from adatom.ops.moe import triton_order

    for dtype in (torch.int32, torch.int64):
        indices = torch.randint(-1, experts + 1, (tokens, 8), device=cuda, dtype=dtype)
        order, offsets, places = triton_order.order(indices, experts)
        want, bounds = plan(indices, experts)
        assert torch.equal(order, want) and torch.equal(offsets, bounds)
        assert torch.equal(places.long(), inverse_of(want)) and torch.equal(triton_order.places_of(order), places)


@pytest.mark.parametrize("backend", ["triton", "hopper_any"])
@pytest.mark.parametrize("tokens", [1, 300, 1200])
def test_capture(cuda, tokens, backend):
    """A captured step gives what an eager one gives, bit for bit, also when the routing has changed since.

    Of hopper_any's backwards, that of 1200 tokens is Hopper's alone; the others' products are Triton's.
    """
    if backend == "hopper_any" and torch.cuda.get_device_capability(cuda)[0] != 9:
        pytest.skip("a Hopper GPU")
    given = tensors(cuda, torch.bfloat16, tokens)
    wanted = [given[i] for i in (0, 1, 3, 4)]

    def step():
        out = adatom.moe_routed(*given, backend=backend)
        return [t.detach() for t in (out, *torch.autograd.grad(out, wanted, torch.ones_like(out)))]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        want = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(g, e) for g, e in zip(got, want))
        with torch.no_grad():
            given[2].copy_(given[2].roll(3, 0))
        with torch.cuda.stream(stream):
            want = step()
        torch.cuda.synchronize()


@pytest.mark.parametrize("tokens", [1, 3])
def test_few_tokens_in_a_row(cuda, tokens):
    """Calls that follow each other closely, each with other tokens, where what one leaves in memory looks like what the
    next is to write: the kernels of a call wait for its own numbers. NaN is a number that comes."""
    if torch.cuda.get_device_capability(cuda)[0] != 9:
        pytest.skip("a Hopper GPU")
    given = tensors(cuda, torch.bfloat16, 16 * tokens, 512, 768, 64, 8)
    x, weights, indices, gate_up, down = (t.detach() for t in given)
    x[:tokens] = torch.nan

    def calls(backend):
        given = (t.split(tokens) for t in (x, weights, indices))
        return [adatom.moe_routed(*few, gate_up, down, backend=backend) for few in zip(*given)]

    calls("hopper_one")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        got = calls("hopper_one")
    for _ in range(5):
        graph.replay()
    wanted = calls("triton")
    assert bool(got[0].isnan().all()) and bool(wanted[0].isnan().all())
    for have, want in zip(got[1:], wanted[1:]):
        assert (have.float() - want.float()).norm() <= 2e-2 * want.float().norm()


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_large_gates_in_float16(cuda, tokens):
    """Values of act(gate) * up below float16's largest number, which their weights would take beyond it."""
    given = tensors(cuda, torch.float16, tokens, 512, 264, 16, 4)
    x, weights, indices, gate_up, down = (t.detach() for t in given)
    gate, up = (x.double() @ gate_up.double().mT).chunk(2, -1)
    x = x * (5e4 / (gate.relu() * up).abs().max()).sqrt()
    given = x, weights * 0 + 4, indices, gate_up, down * 0.01
    got = adatom.moe_routed(*given)
    want = adatom.moe_routed(*(t.double() if t.is_floating_point() else t for t in given), backend="reference")
    assert (got.double() - want).norm() <= 2e-3 * want.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_second_derivatives(cuda, dtype):
    """Gradients of a gradient penalty: about what float64 gives."""
    given = tensors(cuda, dtype)

    def penalty(given):
        wanted = [given[i] for i in (0, 1, 3, 4)]
        first = torch.autograd.grad(adatom.moe_routed(*given).sum(), wanted, create_graph=True)
        return torch.autograd.grad(sum(g.float().square().sum() for g in first), wanted)

    wide = [t if t.dtype == torch.int64 else t.detach().double().requires_grad_() for t in given]
    for got, want in zip(penalty(given), penalty(wide)):
        tolerance = 1e-3 if dtype == torch.float32 else 3e-2
        assert (got.double() - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize("options", [{}, {"scoring": "sigmoid", "groups": (4, 2)}, {"renormalize": False}], ids=str)
@pytest.mark.parametrize("tokens", [1, 700])
def test_routing(cuda, tokens, options):
    """As on a CPU, of equals and of what is no number too; a captured call, and a remembered one, the same bits."""
    logits = torch.randn(tokens, 64, device=cuda, dtype=torch.bfloat16).mul(4).round()  # of which many are equal
    bias = torch.zeros(128, device=cuda)[::2] if "groups" in options else None
    logits[5::6, 9], logits[4::6, 50] = torch.inf, torch.nan
    wants = logits.cpu().requires_grad_()
    want = adatom.moe_route(wants, 6, selection_bias=None if bias is None else bias.cpu(), **options)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        got = adatom.moe_route(logits, 6, selection_bias=bias, **options)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = adatom.moe_route(logits, 6, selection_bias=bias, **options)
    graph.replay()
    needs = logits.clone().requires_grad_()
    for other in (captured, adatom.moe_route(needs, 6, selection_bias=bias, **options)):
        assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(other, got))
    whole = ~want[0].isnan().any(1)
    assert whole.any() and torch.equal(got[1].cpu()[whole], want[1][whole])
    torch.testing.assert_close(got[0].cpu(), want[0].detach(), equal_nan=True)
    first = [
        torch.autograd.grad(w[0].square().sum(), x, create_graph=True)[0] for w, x in ((other, needs), (want, wants))
    ]
    torch.testing.assert_close(first[0].cpu(), first[1], equal_nan=True)
    second = [torch.autograd.grad(g[:4].square().sum(), x)[0] for g, x in zip(first, (needs, wants))]
    torch.testing.assert_close(second[0].cpu(), second[1], equal_nan=True)
    plain = torch.autograd.grad(adatom.moe_route(needs, 6, selection_bias=bias, **options)[0].square().sum(), needs)[0]
    torch.testing.assert_close(plain, first[0], equal_nan=True)
