"""The short way of repeated calls on a GPU, walked here on CPU tensors through Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import adatom
from adatom import device, signature
from adatom.ops.attention import api, op

ROOT = Path(__file__).parent.parent
SCRIPT = """
import torch, adatom
from adatom import signature
from adatom.ops.attention import api, op, triton_call

signature.ANY_DEVICE = True  # CPU tensors may take the short way too
torch.set_num_threads(1)
built = []
call = triton_call.Call.__init__
triton_call.Call.__init__ = lambda self, *a: (built.append(1), call(self, *a))[1]

def tensors(seed, n=21, grad=True):
    torch.manual_seed(seed)
    return [torch.randn(1, 2, n, 16, requires_grad=grad) for _ in range(3)]

def three_orders(q, k, v, **options):
    out = adatom.attention(q, k, v, backend="triton", causal=True, **options)
    grads = torch.autograd.grad(out.sin().sum(), (q, k, v), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in grads), (q, k, v))
    return out, *grads, *second

def dense(q, k, v, **options):
    out = adatom.attention(q, k, v, backend="reference", causal=True, **options)
    grads = torch.autograd.grad(out.sin().sum(), (q, k, v), create_graph=True)
    return out, *grads, *torch.autograd.grad(sum(g.square().sum() for g in grads), (q, k, v))

def close(a, b):
    for x, y in zip(a, b):
        assert torch.allclose(x, y, rtol=1e-3, atol=1e-4), (x - y).abs().max()

first = tensors(0)
close(three_orders(*first), dense(*first))
n = len(built)
assert n == 6, n  # forward, two passes of the backward, three of the double backward
for seed in (1, 2):  # other numbers, the same signature: nothing is worked out again
    again = tensors(seed)
    close(three_orders(*again), dense(*again))
assert len(built) == n
for other in (tensors(3, n=22), [x.detach().double().float().requires_grad_() for x in tensors(4)]):
    close(three_orders(*other), dense(*other))
assert len(built) == n + 6  # another length, and the old one
strided = [torch.randn(1, 21, 2, 16).transpose(1, 2).requires_grad_() for _ in range(3)]
close(three_orders(*strided), dense(*strided))
assert len(built) == n + 12
out, lse = adatom.attention(*first, backend="triton", causal=True, return_lse=True)
assert lse.requires_grad and lse.shape == (1, 2, 21)
close(torch.autograd.grad(lse.sum(), first[:2]), torch.autograd.grad(
    adatom.attention(*first, backend="reference", causal=True, return_lse=True)[1].sum(), first[:2]))
with torch.no_grad():
    assert not adatom.attention(*first, backend="triton").requires_grad
frozen = tensors(5, grad=False)
assert adatom.attention(*frozen, backend="triton").grad_fn is None
assert adatom.attention(frozen[0], frozen[1], first[2], backend="triton").requires_grad
"""


def test_repeated_calls_are_remembered_and_right():
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture
def short(monkeypatch):
    """CPU tensors may take the short way; nothing is remembered from before."""
    monkeypatch.setattr(signature, "ANY_DEVICE", True)
    monkeypatch.setattr(op, "_ready", {})
    monkeypatch.setattr(api, "_plans", {})
    monkeypatch.setattr(api, "_latest", {})


def test_a_cpu_takes_the_short_way_and_still_looks_at_lengths(monkeypatch):
    monkeypatch.setattr(op, "_ready", {})
    monkeypatch.setattr(api, "_plans", {})
    q = torch.randn(2, 2, 8, 16)
    for _ in range(2):
        out = adatom.attention(q, q, q)
    assert len(api._plans) == 1
    assert torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(q, q, q), atol=1e-6)
    adatom.attention(q, q, q, kv_lens=torch.tensor([8, 3]))
    with pytest.raises(ValueError, match="kv_lens between 0 and seqlen_k"):
        adatom.attention(q, q, q, kv_lens=torch.tensor([9, 3]))
    here = signature.signature((q,), cpu=True)
    with device.pretend(device.Device("cuda", 90, 132, 232448)):
        assert signature.signature((q,), cpu=True) != here
    assert signature.signature((q,)) is None


def test_what_differs_has_a_signature_of_its_own(short):
    q = torch.randn(2, 3, 8, 16)
    odd = torch.empty(2 * 3 * 8 * 16 + 1)[1:].view(2, 3, 8, 16)  # not aligned to 16 bytes
    others = [q[:1], q.double(), q.transpose(1, 2), q[:, :, ::2], odd, q.transpose(1, 2).contiguous().transpose(1, 2)]
    keys = {signature.signature((x,)) for x in (q, *others)}
    assert len(keys) == 7 and signature.signature((torch.randn(2, 3, 8, 16),)) in keys
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(not before)
    try:
        assert signature.signature((q,)) not in keys
    finally:
        torch.use_deterministic_algorithms(before)


def test_what_others_look_on_goes_the_long_way(short):
    class Mine(torch.Tensor):
        pass

    q = torch.randn(1, 2, 8, 16)
    planned = lambda *a: api._planned((*a, None, None, None), OPTIONS)  # noqa: E731
    assert planned(q, q, q) is not None
    assert planned(q, q, q.as_subclass(Mine)) is None
    assert planned(torch._neg_view(q), q, q) is None
    assert api._planned((q, q, q, None, None, None), (None, False, [1, 2], *[None] * 4, False)) is None
    assert planned(q.transpose(2, 3).contiguous().transpose(2, 3), q, q) is None  # would be copied
    seen = []
    torch.func.vmap(lambda x: seen.append(planned(x, x, x)) or x)(q[None])
    with torch.autograd.forward_ad.dual_level():
        seen.append(planned(q, q, q))
    with torch._subclasses.fake_tensor.FakeTensorMode():
        seen.append(planned(q, q, q))
    torch.set_autocast_enabled("cuda", True)
    try:
        seen.append(planned(q, q, q))
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert seen == [None] * 4


@pytest.fixture
def gpu(short, monkeypatch):
    """CPU tensors count as those of the current GPU, whose calls are compared with the latest."""
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)


OPTIONS = (None, False, *[None] * 5, False)


def test_tensors_like_the_latest_take_its_plan(gpu, monkeypatch):
    q, k, v, bias = (torch.randn(1, 2, 8, n) for n in (16, 16, 16, 8))
    sinks = torch.randn(2)
    again = lambda *a, o=OPTIONS: api._again((*a, *[None] * (6 - len(a))), o)  # noqa: E731
    assert again(q, k, v) is None
    want = adatom.attention(q, k, v)
    with_bias, with_sinks = adatom.attention(q, k, v, bias=bias), adatom.attention(q, k, v, sinks=sinks)
    plan = again(q, k, v)[0]
    assert again(*(x.clone() for x in (q, k, v)))[0] is plan
    others = again(q, k, v, bias)[0], again(q, k, v, None, sinks)[0]
    assert len({plan, *others}) == 3
    assert again(q, k, v, bias, sinks) is None
    monkeypatch.setattr(api, "_planned", None)
    assert torch.equal(adatom.attention(q, k, v), want)
    assert torch.equal(adatom.attention(q, k, v, bias=bias), with_bias)
    assert torch.equal(adatom.attention(q, k, v, sinks=sinks), with_sinks)
    rows = adatom.attention(*(x[:, None] for x in (q, k, v)))
    assert torch.equal(rows, want[:, None])
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)  # another device is current
    assert torch.equal(adatom.attention(q, k, v), want)


@pytest.mark.parametrize(("good", "bad"), [
    ({"window": (1, 0)}, {"window": (1.0, 0)}), ({"window": (1, 0)}, {"window": (1, -0.0)}),
    ({"window": (1, 0)}, {"window": (1 + 0j, 0)}), ({"scale": 1.0}, {"scale": 1 + 0j}),
    ({"softcap": 2.0}, {"softcap": 2 + 0j}), ({"causal": True}, {"causal": 1.0}),
])  # fmt: skip
def test_what_equals_options_of_a_plan_is_refused_all_the_same(gpu, good, bad):
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    for _ in range(2):
        adatom.attention(q, k, v, **good)
        with pytest.raises((TypeError, ValueError), match="expected"):
            adatom.attention(q, k, v, **bad)


def test_layers_that_take_turns_keep_their_plans(gpu):
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    layers = (q, k, v), (turned, k, v), (q, turned, v), (q, k, turned)
    again = lambda a: api._again((*a, None, None, None), OPTIONS)  # noqa: E731
    for layer in layers:
        adatom.attention(*layer)
    plans = [again(layer)[0] for layer in layers]
    assert len(set(plans)) == 4
    adatom.attention(turned, turned.clone(), v)
    assert [again(layer) and again(layer)[0] for layer in layers] == [None, *plans[1:]]  # the oldest makes room
    for same in ((q, q, v), (q, k, q), (q, k, k)):
        adatom.attention(*same)
        assert again(same) is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_differs_from_the_latest_is_looked_up(gpu):
    class Mine(torch.Tensor):
        pass

    class Mode(torch.overrides.TorchFunctionMode):
        pass

    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    adatom.attention(q, k, v)
    odd = torch.empty(2 * 8 * 16 + 1)[1:].view(1, 2, 8, 16)  # not aligned to 16 bytes
    again = lambda *a, o=OPTIONS: api._again((*a, None, None, None), o)  # noqa: E731
    assert again(q, k, v) is not None
    differ = [
        q[:, :1], q.double(), q.transpose(1, 2).contiguous().transpose(1, 2), odd, q.clone().requires_grad_(),
        q.as_subclass(Mine), torch.nn.Parameter(q), torch._neg_view(q), q.to("meta"),
        torch._efficientzerotensor(q.shape), q[0], None, "q", torch.nested.nested_tensor([q[0]]),
    ]  # fmt: skip
    assert [again(x, k, v) for x in differ] == [again(q, k, x) for x in differ] == [None] * len(differ)
    assert again(q, k, v, o=(True, *OPTIONS[1:])) is again(q, k, v, o=(False, [1, 2], *OPTIONS[2:])) is None
    seen = []
    torch.func.vmap(lambda x: seen.append((again(x, k, v), again(q, k, v))) or x)(q[None])
    torch.func.grad(lambda x: seen.append((again(x, k, v), again(q, k, v))) or x.sum())(q)
    before = torch.are_deterministic_algorithms_enabled()
    contexts = [
        torch.autograd.forward_ad.dual_level(), torch._subclasses.fake_tensor.FakeTensorMode(), torch.autocast("cpu"),
        Mode(), torch.autograd.profiler.profile(), torch.inference_mode(),
    ]  # fmt: skip
    for context in contexts:
        with context:
            seen.append((again(q, k, v), None))
    torch.use_deterministic_algorithms(not before)
    try:
        seen.append((again(q, k, v), None))
    finally:
        torch.use_deterministic_algorithms(before)
    assert seen == [(None, None)] * 9
    assert again(q, k, v) is not None


def test_gradients_of_a_call_like_the_latest(gpu):
    q, k, v, bias = (torch.randn(1, 2, 8, n, requires_grad=True) for n in (16, 16, 16, 8))
    sinks = torch.randn(2, requires_grad=True)
    for given, tensors in (({}, (q, k, v)), ({"bias": bias, "sinks": sinks}, (q, k, v, bias, sinks))):
        want = adatom.attention(q, k, v, backend="reference", **given)
        wanted = torch.autograd.grad(want.sin().sum(), tensors)
        for _ in range(2):
            out = adatom.attention(q, k, v, **given)
            assert "Planned" in type(out.grad_fn).__name__
            for a, b in zip(torch.autograd.grad(out.sin().sum(), tensors), wanted):
                assert torch.allclose(a, b, atol=1e-5)
        with torch.no_grad():
            assert adatom.attention(q, k, v, **given).grad_fn is None
        (second,) = torch.autograd.grad(adatom.attention(q, k, v, **given).sin().sum(), q, create_graph=True)
        assert second.requires_grad


def test_a_remembered_backward_takes_cotangents_of_any_kind(short):
    """Past the dispatcher go those that a kernel can read as they lie; the others are resolved on the way."""
    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    out = adatom.attention(q, k, v)
    assert "Planned" in type(out.grad_fn).__name__
    g = torch.randn_like(out)
    several = torch.stack([g, 2 * g])
    for dout in (g, torch._neg_view(g), g.mT.contiguous().mT, g[:, :, :1].expand_as(g)):
        for a, b in zip(torch.autograd.grad(out, (q, k, v), dout, retain_graph=True),
                        torch.autograd.grad(want, (q, k, v), dout, retain_graph=True)):  # fmt: skip
            assert torch.allclose(a, b, atol=1e-5)
    batched = torch.autograd.grad(out, (q, k, v), several, is_grads_batched=True, retain_graph=True)
    for a, b in zip(batched, torch.autograd.grad(want, (q, k, v), g, retain_graph=True)):
        assert torch.allclose(a, torch.stack([b, 2 * b]), atol=1e-5)
    other = lambda x: x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, other):  # what was saved comes back with other strides
        out = adatom.attention(q, k, v)
    for a, b in zip(torch.autograd.grad(out, (q, k, v), g), torch.autograd.grad(want, (q, k, v), g)):
        assert torch.allclose(a, b, atol=1e-5)


def test_options_given_as_tensors_count_by_value(short):
    q = torch.randn(1, 2, 8, 16)
    for scale in (0.3, 0.9):
        as_tensor = adatom.attention(q, q, q, scale=torch.tensor(scale))
        assert torch.allclose(as_tensor, adatom.attention(q, q, q, scale=scale), atol=1e-6)


def test_forward_mode_over_a_planned_backward(short):
    q = torch.randn(1, 2, 8, 16, dtype=torch.float64, requires_grad=True)
    along = torch.randn_like(q)
    with torch.enable_grad():
        out = adatom.attention(q, q.detach(), q.detach())
    assert "Planned" in type(out.grad_fn).__name__
    with torch.autograd.forward_ad.dual_level():
        dout = torch.autograd.forward_ad.make_dual(torch.ones_like(out), along)
        (dq,) = torch.autograd.grad(out, q, dout, retain_graph=True)
        tangent = torch.autograd.forward_ad.unpack_dual(dq).tangent
    (want,) = torch.autograd.grad(out, q, along)  # dq is linear in dout
    assert torch.allclose(tangent, want)


@pytest.mark.filterwarnings("ignore")
def test_traces_and_tensors_without_storage_go_the_long_way(short):
    q = torch.randn(1, 2, 8, 16)
    with torch.no_grad():
        traced = torch.jit.trace(lambda x: adatom.attention(x, x, x), (q,))
        other = torch.randn(1, 2, 8, 16)
        assert torch.allclose(traced(other), adatom.attention(other, other, other), atol=1e-6)
    leaked = []
    torch.func.grad(lambda x: (leaked.append(x), x.sum())[1])(q)
    assert signature.signature((leaked[0],)) is None
    assert signature.signature((torch._efficientzerotensor((1, 2, 8, 16)),)) is None


def test_a_remembered_call_still_refuses_what_is_wrong(short):
    q = torch.randn(1, 2, 8, 16)
    adatom.attention(q, q, q)
    for k, v in ((q, q[0]), (q[..., :8], q), (q, q.double()), (q, torch.randn(1, 2, 9, 16))):
        with pytest.raises((ValueError, TypeError), match="adatom: expected"):
            adatom.attention(q, k, v)


def test_memory_of_calls_is_bounded(short, monkeypatch):
    for n in range(1, 20):
        adatom.attention(*[torch.randn(1, 1, n, 8)] * 3)
    assert len(api._plans) == 19
    api._plans.update(dict.fromkeys(range(5000)))
    api._latest.update(dict.fromkeys(range(5000)))
    op._ready.update(dict.fromkeys(range(5000)))
    adatom.attention(*[torch.randn(1, 1, 30, 8)] * 3)
    assert len(api._plans) == len(op._ready) == 1 and not api._latest


def test_the_wide_tile_of_the_triton_forward_is_for_tma_and_many_whole_blocks():
    """And fewer heads are in flight on an H100 alone, beyond head_dim 64 without a mask."""
    pytest.importorskip("triton")
    from adatom.compile import DEVICES
    from adatom.ops.attention import triton_fwd
    from adatom.ops.attention.triton_call import Call

    def chosen(arch, length=2048, dim=64, short=False, **options):
        q = torch.empty(4, 8, length, dim, dtype=torch.bfloat16)
        with device.pretend(DEVICES[arch]):
            call = Call(*api.inputs_of(q=q, k=q, v=q, **options)[:2])
            tile = triton_fwd._tile(call)
            assert (tile is triton_fwd._SHORT) == short
            return tile.block_n, call.counts()[4] // triton_fwd._counts(call)[4]

    assert chosen(90) == chosen(90, causal=True) == (128, 4)
    assert chosen(90, window=(100, 100))[0] == chosen(90, length=128)[0] == chosen(90, dim=32)[0] == 64
    assert chosen(90, dim=128) == (64, 4) and chosen(90, dim=128, causal=True) == (64, 1)
    assert all(chosen(90, length=n, causal=True, short=True) == (64, 4) for n in (512, 1024))
    assert chosen(90, length=1024) == chosen(90, length=1025, causal=True) == (128, 4)
    assert chosen(80) == chosen(100) == (64, 1)
