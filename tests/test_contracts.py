"""What the public functions promise: right answers over all options, clear errors for bad input, PyTorch's tools."""

import math
import re

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import adatom
from adatom.ops.attention import op
from adatom.ops.attention.api import inputs_of
from adatom.ops.attention.problem import aligned, problem

F64 = torch.float64


pytestmark = pytest.mark.usefixtures("one_thread")


def dense(
    q, k, v, bias=None, causal=False, window=None, softcap=None, sinks=None, kv_lens=None, scale=None, return_lse=False
):
    """Attention by its definition, one batch and head at a time, with loops over what is seen. Differentiable."""
    batch, heads, seqlen_q, head_dim = q.shape
    seqlen_k = k.shape[2]
    left, right = (None if w in (None, -1) else w for w in window or (None, None))
    if bias is not None:
        bias = bias.expand(batch, heads, seqlen_q, seqlen_k)
    outs, lses = [], []
    for b in range(batch):
        length = seqlen_k if kv_lens is None else int(kv_lens[b])
        for h in range(heads):
            kv = h // (heads // k.shape[1])
            scores = q[b, h] @ k[b, kv].T * (1 / math.sqrt(head_dim) if scale is None else scale)
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            see = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool)
            for i in range(seqlen_q):
                at = i + length - seqlen_q
                for j in range(length):
                    see[i, j] = (
                        not (causal and j > at)
                        and (left is None or j >= at - left)
                        and (right is None or j <= at + right)
                    )
            if bias is not None and bias.dtype == torch.bool:
                see &= bias[b, h]
            elif bias is not None:
                see &= bias[b, h] > -torch.inf
                scores = scores + bias[b, h].masked_fill(~see, 0.0)
            e = torch.where(see, torch.exp(torch.where(see, scores, 0.0)), 0.0)
            total = e.sum(-1) + (torch.exp(sinks[h]) if sinks is not None else 0.0)
            some = total > 0
            outs.append(torch.where(some[:, None], e @ v[b, kv] / torch.where(some, total, 1.0)[:, None], 0.0))
            lses.append(torch.where(some, torch.log(torch.where(some, total, 1.0)), -torch.inf))
    out = (
        torch.stack(outs).reshape(batch, heads, seqlen_q, v.shape[-1])
        if outs
        else q.new_zeros(*q.shape[:3], v.shape[-1])
    )
    lse = torch.stack(lses).reshape(batch, heads, seqlen_q) if lses else q.new_zeros(q.shape[:3])
    return (out, lse) if return_lse else out


# Random calls --------------------------------------------------------------------------------------------------------

LAYOUTS = ("contiguous", "heads inside", "sliced", "transposed", "expanded", "overlapping")


def laid_out(x, layout):
    """The values of x, with other strides."""
    if layout == "heads inside":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced":
        return torch.cat([x, x.flip(2), x], -1)[..., : x.shape[-1]]
    if layout == "transposed":  # the last dimension is not contiguous
        return x.mT.contiguous().mT
    if layout == "expanded":
        return x[:1, :1].expand_as(x) if x.shape[0] and x.shape[1] else x
    if layout == "overlapping":  # rows are windows of one sequence
        length, dim = x.shape[2:]
        return x.flatten(2)[..., : length + dim - 1].unfold(-1, dim, 1) if length else x
    return x


@st.composite
def calls(draw):
    """Arguments of adatom.attention: a dict of float64 tensors and options."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape):
        return torch.randn(shape, dtype=F64, generator=generator)

    batch = draw(st.sampled_from((1, 2, 3, 0)))
    kv_heads = draw(st.sampled_from((1, 2)))
    heads = kv_heads * draw(st.sampled_from((1, 3)))
    seqlen_q, seqlen_k = draw(st.integers(0, 9)), draw(st.integers(0, 11))
    head_dim, head_dim_v = draw(st.sampled_from((1, 3, 8))), draw(st.sampled_from((1, 5, 8)))
    layouts = st.sampled_from(LAYOUTS)
    q = laid_out(normal(batch, heads, seqlen_q, head_dim), draw(layouts))
    k = laid_out(normal(batch, kv_heads, seqlen_k, head_dim), draw(layouts))
    v = laid_out(normal(batch, kv_heads, seqlen_k, head_dim_v), draw(layouts))
    options = {
        "causal": draw(st.booleans()),
        "window": draw(st.sampled_from((None, (2, None), (None, 1), (1, 1), (0, 0), (-1, 3)))),
        "softcap": draw(st.sampled_from((None, 1.5))),
        "scale": draw(st.sampled_from((None, 0.3))),
    }
    bias = draw(st.sampled_from(("none", "float", "-inf", "bool")))
    if bias != "none":
        shape = [size if draw(st.booleans()) else 1 for size in (batch, heads, seqlen_q, seqlen_k)]
        options["bias"] = normal(*shape[draw(st.integers(0, 3)) if shape[0] == 1 else 0 :])
        hidden = torch.rand(options["bias"].shape, generator=generator) < 0.4
        if bias == "-inf":
            options["bias"] = options["bias"].masked_fill(hidden, -torch.inf)
        elif bias == "bool":
            options["bias"] = ~hidden
    if draw(st.booleans()):
        options["kv_lens"] = torch.randint(0, seqlen_k + 1, (batch,), generator=generator)
    if draw(st.booleans()):
        options["sinks"] = normal(heads)
    return dict(q=q, k=k, v=v, **options)


def check(call, backend):
    """Out, lse and all first derivatives of one call equal those of the definition."""
    names = [n for n, x in call.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    leaves = [call[n].detach().requires_grad_() for n in names]
    call = {**call, **dict(zip(names, leaves))}
    out, lse = adatom.attention(**call, return_lse=True, backend=backend)
    expected, expected_lse = dense(**call, return_lse=True)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-9, atol=1e-9)
    finite = expected_lse > -torch.inf  # the derivative of lse is one of the definition only there
    weight = torch.cos(torch.arange(out.numel(), dtype=F64)).reshape(out.shape)
    results = [
        (o * weight).sum() + torch.where(finite, s, 0.0).sin().sum() for o, s in ((out, lse), (expected, expected_lse))
    ]
    # An empty batch leaves no graph behind the definition, hence the sum that adds nothing.
    got, want = (torch.autograd.grad(r + sum(0 * x.sum() for x in leaves), leaves) for r in results)
    for name, a, b in zip(names, got, want):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8, msg=lambda m, name=name: f"gradient of {name}: {m}")


@pytest.mark.parametrize("backend", [None, "reference"])
def test_random_calls(backend):
    @settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(calls())
    def run(call):
        check(call, backend)

    run()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_random_calls_in_lower_precision(dtype):
    @settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(calls())
    def run(call):
        low = {n: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in call.items()}
        exact = {n: x.to(F64) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in low.items()}
        out, lse = adatom.attention(**low, return_lse=True)
        expected, expected_lse = dense(**exact, return_lse=True)
        assert out.dtype == dtype and lse.dtype == torch.float32
        tolerance = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
        torch.testing.assert_close(out.to(F64), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse.to(F64), expected_lse, rtol=tolerance, atol=tolerance)

    run()


@st.composite
def packed(draw):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    count = draw(st.integers(0, 4))
    lens = [[draw(st.integers(0, 6)) for _ in range(count)] for _ in "qk"]
    cu = [torch.tensor([0, *torch.tensor(n, dtype=torch.int32).cumsum(0).tolist()], dtype=torch.int32) for n in lens]
    shapes = (sum(lens[0]), 4, 8), (sum(lens[1]), 2, 8), (sum(lens[1]), 2, 3)
    q, k, v = (torch.randn(shape, dtype=F64, generator=generator) for shape in shapes)
    options = {
        "causal": draw(st.booleans()),
        "window": draw(st.sampled_from((None, (2, None), (1, 1)))),
        "softcap": draw(st.sampled_from((None, 1.5))),
    }
    if draw(st.booleans()):
        options["sinks"] = torch.randn(4, dtype=F64, generator=generator)
    return q, k, v, *cu, options


def test_random_packed_calls():
    @settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(packed())
    def run(call):
        q, k, v, cu_q, cu_k, options = call
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out, lse = adatom.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, **options)
        expected, expected_lse = torch.zeros_like(out), torch.zeros_like(lse)
        for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:]):
            one = (x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d]))
            one_out, one_lse = dense(*one, **options, return_lse=True)
            expected[a:b], expected_lse[:, a:b] = one_out[0].transpose(0, 1), one_lse[0]
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-9, atol=1e-9)
        if expected.requires_grad:
            got, want = (torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (out, expected))
            for x, y in zip(got, want):
                torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-8)

    run()


def test_jvp():
    q, k, v = (torch.randn(2, 2, n, 8, dtype=F64) for n in (5, 7, 7))
    bias, tangents = torch.randn(5, 7, dtype=F64), [torch.randn(2, 2, n, 8, dtype=F64) for n in (5, 7, 7)]

    def f(attention):
        return torch.func.jvp(lambda *x: attention(*x, bias=bias, causal=True), (q, k, v), tuple(tangents))

    for got, want in zip(f(adatom.attention), f(dense)):
        torch.testing.assert_close(got, want)


# Bad input -----------------------------------------------------------------------------------------------------------

Q = torch.zeros(2, 4, 5, 8)
KV = torch.zeros(2, 2, 7, 8)


BAD = {
    "no tensor": ({"q": [1.0]}, TypeError, r"tensors q, k and v; got q=\[1.0\], k=float32\[2, 2, 7, 8\]"),
    "rank": ({"q": Q[0]}, ValueError, r"4-D.*q=float32\[4, 5, 8\]"),
    "batch": ({"k": KV[:1], "v": KV[:1]}, ValueError, r"one batch.*q=float32\[2, 4, 5, 8\].*k=float32\[1, 2, 7, 8\]"),
    "lengths": ({"v": KV[:, :, :6]}, ValueError, r"same heads and length.*v=float32\[2, 2, 6, 8\]"),
    "kv heads": ({"v": KV[:, :1]}, ValueError, r"same heads and length.*v=float32\[2, 1, 7, 8\]"),
    "head groups": ({"q": Q[:, :3]}, ValueError, r"multiple of the heads.*q=float32\[2, 3, 5, 8\]"),
    "head_dim": ({"k": KV[..., :4]}, ValueError, r"same head_dim.*k=float32\[2, 2, 7, 4\]"),
    "head_dim 0": ({"q": Q[..., :0], "k": KV[..., :0]}, ValueError, r"at least 1.*q=float32\[2, 4, 5, 0\]"),
    "v's head_dim 0": ({"v": KV[..., :0]}, ValueError, r"at least 1.*v=float32\[2, 2, 7, 0\]"),
    "mixed dtypes": ({"q": Q.half()}, TypeError, r"one dtype.*q=float16\[2, 4, 5, 8\].*k=float32"),
    "integers": ({"q": Q.int(), "k": KV.int(), "v": KV.int()}, TypeError, r"one dtype: float16.*q=int32"),
    "complex": ({"q": Q.cfloat(), "k": KV.cfloat(), "v": KV.cfloat()}, TypeError, r"one dtype: float16.*q=complex64"),
    "devices": ({"q": Q.to("meta")}, ValueError, r"one device.*on meta.*on cpu"),
    "integer bias": (
        {"bias": torch.zeros(5, 7, dtype=torch.int64)},
        TypeError,
        r"float dtype, or bool.*int64\[5, 7\]",
    ),
    "sparse": ({"q": Q.to_sparse()}, TypeError, "not sparse or nested ones"),
    "nested": ({"q": torch.nested.as_nested_tensor(list(Q), layout=torch.jagged)}, TypeError, "attention_varlen"),
    "sparse bias": ({"bias": torch.eye(5, 7).to_sparse()}, TypeError, r"dense tensor.*float32\[5, 7\]"),
    "bias of 8 bits": ({"bias": torch.zeros(5, 7).to(torch.float8_e5m2)}, TypeError, "float dtype.*float8_e5m2"),
    "bias no tensor": ({"bias": 0.5}, TypeError, r"bias as a dense tensor.*bias=0.5"),
    "double bias": (
        {"bias": torch.zeros(5, 7, dtype=F64)},
        TypeError,
        r"float64 bias with float64 inputs.*float64\[5, 7\]",
    ),
    "bias shape": ({"bias": torch.zeros(7, 5)}, ValueError, r"\(2, 4, 5, 7\).*bias=float32\[7, 5\]"),
    "bias rank": ({"bias": torch.zeros(1, 1, 1, 5, 7)}, ValueError, r"\(2, 4, 5, 7\).*\[1, 1, 1, 5, 7\]"),
    "bias device": ({"bias": torch.zeros(5, 7, device="meta")}, ValueError, "bias on q's device.*meta"),
    "kv_lens list": ({"kv_lens": [1, 2]}, TypeError, r"kv_lens as a dense tensor.*\[1, 2\]"),
    "kv_lens float": ({"kv_lens": torch.ones(2)}, TypeError, r"int32 or int64.*float32\[2\]"),
    "kv_lens shape": ({"kv_lens": torch.tensor([1])}, ValueError, r"shape \(2,\).*int64\[1\]"),
    "kv_lens negative": (
        {"kv_lens": torch.tensor([-1, 2])},
        ValueError,
        "between 0 and seqlen_k = 7; got smallest=-1",
    ),
    "kv_lens large": ({"kv_lens": torch.tensor([1, 8])}, ValueError, "between 0 and seqlen_k = 7.*largest=8"),
    "sinks shape": ({"sinks": torch.zeros(2)}, ValueError, r"shape \(4,\).*float32\[2\]"),
    "sinks of 8 bits": ({"sinks": torch.zeros(4).to(torch.float8_e5m2)}, TypeError, "float dtype.*float8_e5m2"),
    "sinks sparse": ({"sinks": torch.zeros(4).to_sparse()}, TypeError, "sinks as a dense tensor"),
    "kv_lens sparse": ({"kv_lens": torch.ones(2).long().to_sparse()}, TypeError, "kv_lens as a dense tensor"),
    "sinks integer": ({"sinks": torch.zeros(4, dtype=torch.int32)}, TypeError, r"float dtype.*int32\[4\]"),
    "window number": ({"window": 3}, TypeError, "pair.*window=3"),
    "window triple": ({"window": (1, 2, 3)}, TypeError, r"pair.*\(1, 2, 3\)"),
    "window negative": ({"window": (-2, 0)}, ValueError, r"non-negative.*\(-2, 0\)"),
    "window fraction": ({"window": (1.5, 0)}, TypeError, r"integers.*\(1.5, 0\)"),
    "window text": ({"window": ("1", 0)}, TypeError, r"integers.*\('1', 0\)"),
    "causal text": ({"causal": "no"}, TypeError, "True or False.*'no'"),
    "causal number": ({"causal": 1.0}, TypeError, "True or False.*1.0"),
    "causal tensor": ({"causal": torch.tensor([True, False])}, TypeError, "True or False.*bool"),
    "window tensor": ({"window": (torch.tensor(3), 0)}, TypeError, "integers"),
    "softcap negative": ({"softcap": -1.0}, ValueError, "softcap > 0.*-1.0"),
    "softcap infinite": ({"softcap": math.inf}, ValueError, "finite softcap.*inf"),
    "softcap nan": ({"softcap": math.nan}, ValueError, "finite softcap.*nan"),
    "softcap text": ({"softcap": "30"}, ValueError, "finite softcap.*'30'"),
    "scale": ({"scale": math.nan}, ValueError, "finite scale.*nan"),
    "scale infinite": ({"scale": -math.inf}, ValueError, "finite scale.*-inf"),
    "scale beyond float32": ({"scale": 1e39}, ValueError, "finite scale"),
    "scale beyond float64": ({"scale": 10**400}, ValueError, r"finite scale.*0\.\.\.$"),
    "scale learned": ({"scale": torch.ones((), requires_grad=True)}, ValueError, "multiply q by it.*float32"),
    "softcap learned": ({"softcap": torch.ones((), requires_grad=True)}, ValueError, "not one that is learned"),
    "scale text": ({"scale": "0.1"}, ValueError, "finite scale.*'0.1'"),
    "precision": ({"precision": "fp8"}, ValueError, "tf32x3.*precision='fp8'"),
    "backend": (
        {"backend": "cudnn"},
        ValueError,
        "no backend 'cudnn' for attention_fwd; there are: .*triton.*reference",
    ),
    "backend number": ({"backend": 3}, TypeError, "by name.*3"),
    "backend list": ({"backend": ["triton"]}, TypeError, "by name"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_answered(name):
    wrong, error, message = BAD[name]
    with pytest.raises(error, match=f"(?s){message}"):
        adatom.attention(**{"q": Q, "k": KV, "v": KV, **wrong})


PACKED = {
    "q": torch.zeros(6, 4, 8),
    "k": torch.zeros(9, 2, 8),
    "v": torch.zeros(9, 2, 8),
    "cu_seqlens_q": torch.tensor([0, 2, 6]),
}
PACKED["cu_seqlens_k"] = torch.tensor([0, 5, 9])
BAD_PACKED = {
    "rank": ({"q": Q}, ValueError, r"3-D.*\[2, 4, 5, 8\]"),
    "tokens": ({"v": torch.zeros(8, 2, 8)}, ValueError, r"same tokens and heads.*v=float32\[8, 2, 8\]"),
    "list": ({"cu_seqlens_q": [0, 2, 6]}, TypeError, r"cu_seqlens_q as a dense tensor.*\[0, 2, 6\]"),
    "float": ({"cu_seqlens_k": torch.tensor([0.0, 5, 9])}, TypeError, r"cu_seqlens_k.*float32\[3\]"),
    "sparse": ({"cu_seqlens_k": torch.tensor([0, 5, 9]).to_sparse()}, TypeError, "cu_seqlens_k as a dense tensor"),
    "falling": ({"cu_seqlens_k": torch.tensor([0, 10, 9])}, ValueError, r"never decrease.*\[0, 10, 9\]"),
    "start": ({"cu_seqlens_k": torch.tensor([1, 5, 9])}, ValueError, r"start at 0.*\[1, 5, 9\]"),
    "end": ({"cu_seqlens_q": torch.tensor([0, 2, 5])}, ValueError, r"end at 6 tokens.*\[0, 2, 5\]"),
    "sequences": ({"cu_seqlens_q": torch.tensor([0, 6])}, ValueError, r"both of shape.*int64\[2\].*int64\[3\]"),
    "none": ({"cu_seqlens_q": torch.tensor([], dtype=torch.int32)}, ValueError, r"both of shape.*int32\[0\]"),
    "device": ({"cu_seqlens_q": torch.tensor([0, 2, 6], device="meta")}, ValueError, "q's device.*meta"),
    "bias": ({"bias": torch.zeros(1)}, NotImplementedError, "attention_varlen has none.*pad the batch"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_without_a_shape():
    nested = torch.nested.nested_tensor(list(Q))
    with pytest.raises(TypeError, match="attention_varlen"):
        adatom.attention(nested, nested, nested)


@pytest.mark.parametrize("name", BAD_PACKED)
def test_bad_packed_input_is_answered(name):
    wrong, error, message = BAD_PACKED[name]
    with pytest.raises(error, match=f"(?s){message}"):
        adatom.attention_varlen(**{**PACKED, **wrong})


def test_the_backend_asked_for_or_none():
    """An explicit backend never falls back: it says why it cannot."""
    with pytest.raises(NotImplementedError, match="(?s)nothing can run attention_fwd.*triton: needs a CUDA device"):
        adatom.attention(Q, KV, KV, backend="triton")


@pytest.mark.parametrize("head_dim", [257, 320])
def test_wide_heads(head_dim):
    """Kernels end at 256 and say so; PyTorch takes over."""
    x = torch.randn(1, 2, 5, head_dim, dtype=F64)
    torch.testing.assert_close(adatom.attention(x, x, x), dense(x, x, x))
    x = x.float()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(NotImplementedError, match=f"8 to 256; got {head_dim}"):
        patch.setenv("TRITON_INTERPRET", "1")  # as if a kernel could run here
        adatom.attention(x, x, x, backend="triton")


def test_a_window_of_bools_is_one_of_numbers():
    got, want = (adatom.attention(Q, KV, KV, window=window) for window in ((True, False), (1, 0)))
    torch.testing.assert_close(got, want)


def test_what_lies_far_apart_is_copied():
    """Kernels number the elements of a tile with 32 bits: neither rows nor what a bias adds to them may lie so far."""
    far = torch.zeros(2, 2**23, dtype=torch.bfloat16)
    near = [torch.randn(1, 1, 2, 8).bfloat16() for _ in range(3)]
    apart = [far.as_strided((1, 1, 2, 8), (0, 0, 2**22, 1), 8 * i).copy_(x) for i, x in enumerate(near)]
    x = inputs_of(*apart)[0]
    assert [t.stride(2) for t in x[:3]] == [8, 8, 8] and all(map(torch.equal, x[:3], near))
    cu = torch.tensor([0, 2])
    packed = [t[0].transpose(0, 1) for t in apart]
    assert [t.stride(0) for t in inputs_of(*packed, cu, cu)[0][:3]] == [8, 8, 8]
    just = far.as_strided((1, 1, 2, 8), (0, 0, 2**22 - 8, 1))
    assert inputs_of(just, just, just)[0].q is just
    wide = far.new_empty(2**24 + 8).as_strided((1, 1, 2, 2), (0, 0, 2**24, 1)).fill_(0.5)
    assert inputs_of(*near, bias=wide)[0].bias.stride() == (4, 4, 2, 1)
    alone = wide[:, :, :1]
    assert inputs_of(*near, bias=alone)[0].bias is alone


def test_cotangents_that_lie_far_apart_are_copied(monkeypatch):
    launched = []
    monkeypatch.setattr(op, "_run", lambda name, args, *rest: launched.append(args) or (None,) * 5)
    like = torch.zeros(1, 1, 2, 8)
    far = torch.zeros(2**22 + 8).as_strided((1, 1, 2, 8), (0, 0, 2**22, 1))
    call = (like, like, like, None, None, None, None, None, 1.0, False, -1, -1, 0.0, "ieee", None, like, like[..., 0])
    op.attention_bwd(*call, far, None, False)
    op.attention_bwd_bwd(*call, far, None, far, None, far, None, None, False)
    assert not [t for args in launched for t in args if isinstance(t, torch.Tensor) and t.stride(-2) >= 2**22]
    assert [len(args) for args in launched] == [20, 25]


def test_softcap_zero_is_none():
    torch.testing.assert_close(adatom.attention(Q, KV, KV, softcap=0.0), adatom.attention(Q, KV, KV))


# Rows, and empty shapes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["shared", "own", "repeated", "none", "bool"])
def test_rows(kind):
    """5-D inputs are attention for each row, with a bias that rows share or own; or a 4-D bias for each few of them."""
    torch.manual_seed(0)
    batch, rows, heads, n = 2, 3, 2, 5
    q, k, v = (torch.randn(batch, rows, n, heads, 4, dtype=F64).transpose(2, 3).requires_grad_() for _ in range(3))
    lens = torch.tensor([[5, 2, 0], [1, 5, 3]])
    shape = {"own": (batch, rows, 1, n, n), "none": (heads, n, n)}.get(kind, (batch, 1, heads, n, n))
    bias = torch.randn(shape, dtype=F64).requires_grad_()
    given = bias > 0 if kind == "bool" else bias
    out, lse = adatom.attention(q, k, v, bias=given, kv_lens=lens, causal=True, return_lse=True)
    if kind == "repeated":
        flat = (t.flatten(0, 1) for t in (q, k, v))
        out, lse = adatom.attention(*flat, bias=given[:, 0], kv_lens=lens.flatten(), causal=True, return_lse=True)
        out, lse = out.unflatten(0, (batch, rows)), lse.unflatten(0, (batch, rows))
    each = given.expand(batch, rows, heads, n, n)
    expected = [
        adatom.attention(q[:, r], k[:, r], v[:, r], bias=each[:, r], kv_lens=lens[:, r], causal=True, return_lse=True)
        for r in range(rows)
    ]
    assert out.shape == (batch, rows, heads, n, 4) and lse.shape == (batch, rows, heads, n)
    torch.testing.assert_close(out, torch.stack([e[0] for e in expected], 1))
    torch.testing.assert_close(lse, torch.stack([e[1] for e in expected], 1))
    wanted = (q, k, v) if kind == "bool" else (q, k, v, bias)
    firsts = []
    for one in (out, torch.stack([e[0] for e in expected], 1)):
        grads = torch.autograd.grad(one.square().sum(), wanted, create_graph=True)
        firsts.append((*grads, *torch.autograd.grad(sum(g.square().sum() for g in grads), wanted)))
    for got, want in zip(*firsts):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"k": torch.randn(2, 2, 5, 4)}, "5-D q, k and v"),
        ({"bias": torch.randn(2, 2, 5, 5)}, "broadcasts to (2, 3, heads"),
        ({"bias": torch.randn(1, 3, 2, 5, 5)}, "each row of each batch element"),
        ({"bias": torch.randn(2, 1, 3, 5, 5)}, "broadcasts"),
        ({"kv_lens": torch.tensor([1, 2])}, "kv_lens of shape (2, 3)"),
    ],
)
def test_bad_rows_are_answered(change, says):
    q = torch.randn(2, 3, 2, 5, 4)
    with pytest.raises(ValueError, match="(?s).*" + re.escape(says)):
        adatom.attention(**{"q": q, "k": q, "v": q, **change})


def test_a_bias_that_does_not_divide_the_batch():
    q = torch.randn(4, 2, 5, 4)
    with pytest.raises(ValueError, match="broadcasts"):
        adatom.attention(q, q, q, bias=torch.randn(3, 2, 5, 5))


def test_empty_shapes_have_gradients():
    """No queries, no keys, no batch: zeros of the right shape, and lse -inf where there are queries."""
    for batch, seqlen_q, seqlen_k in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        q = torch.randn(batch, 2, seqlen_q, 8, dtype=F64, requires_grad=True)
        k = torch.randn(batch, 2, seqlen_k, 8, dtype=F64, requires_grad=True)
        out, lse = adatom.attention(q, k, k, return_lse=True)
        assert out.shape == q.shape and (seqlen_k or (out == 0).all() and (lse == -torch.inf).all())
        (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        dq.sum().backward()
        assert (k.grad == 0).all() and k.grad.shape == k.shape


def test_numbers_of_other_kinds():
    """Those of NumPy, sizes that a compiler traces, and, where nothing is differentiated, a learned scale."""
    want = adatom.attention(Q, KV, KV, causal=True, window=(3, 0), scale=0.5)
    learned = torch.nn.Parameter(torch.tensor(0.5))
    with torch.no_grad():
        got = adatom.attention(Q, KV, KV, causal=numpy.bool_(True), window=(numpy.int64(3), False), scale=learned)
    assert torch.equal(got, want)

    def half(q):
        return adatom.attention(q, q, q, causal=q.shape[2] > 4, window=(q.shape[2] // 2, 0))

    graph = make_fx(half, tracing_mode="symbolic")(torch.randn(1, 2, 8, 4))
    for length in (8, 10):  # causal was decided, as any branch is; the window was not
        q = torch.randn(1, 2, length, 4)
        assert torch.equal(graph(q), half(q))


def test_what_tma_cannot_read_is_copied():
    """A contiguous view of the gradient of a concatenation begins anywhere."""
    whole = torch.randn(3 + 64)
    x = whole[3:].view(1, 2, 4, 8)
    assert aligned(x).data_ptr() % 16 == 0 and torch.equal(aligned(x), x) and aligned(whole) is whole


def test_a_bias_of_an_empty_batch_has_a_gradient():
    for q, bias in (
        (torch.randn(0, 2, 4, 8), torch.randn(2, 4, 4)),
        (torch.randn(2, 0, 2, 4, 8), torch.randn(2, 1, 2, 4, 4)),
        (torch.randn(2, 0, 2, 4, 8), torch.randn(2, 0, 2, 4, 4)),
    ):
        bias.requires_grad_()
        adatom.attention(q, q, q, bias=bias).sum().backward()
        assert bias.grad.shape == bias.shape and (bias.grad == 0).all()
    q = torch.randn(0, 2, 4, 8)
    x, o, _ = inputs_of(q, q, q, bias=torch.randn(2, 4, 4))
    assert problem(x, o, bias_grad=True).bias_shared  # by none: its gradient is a sum of nothing


@pytest.mark.parametrize("backend", [None, "reference", "torch_chunked"])
def test_windows_wider_than_32_bits_are_unbounded(backend):
    q, k, v = torch.randn(1, 2, 5, 8), *torch.randn(2, 1, 2, 70, 8)
    for wide, same in (((5, 2**31 - 1), (5, None)), ((2**63 - 1, 3), (None, 3)), ((2**31, 2**70), None)):
        got = adatom.attention(q, k, v, window=wide, backend=backend)
        torch.testing.assert_close(got, adatom.attention(q, k, v, window=same, backend=backend))
