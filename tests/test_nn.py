"""adatom.nn against torch.nn."""

import subprocess
import sys
from functools import partial

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import adatom.nn as modules
from adatom.nn import Attention


@pytest.fixture(autouse=True)
def float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def in_proj_gradients(module):
    return [
        torch.cat([getattr(module, n).weight.grad for n in "qkv"]),
        torch.cat([getattr(module, n).bias.grad for n in "qkv"]),
    ]


MASKS = ("none", "bool", "float", "per-head", "padding", "both", "float-padding")


def masks(kind, batch, heads, seqlen_q, seqlen_k):
    """What to give nn.MultiheadAttention; the first key is never masked."""
    square = torch.rand(seqlen_q, seqlen_k) < 0.3
    padding = torch.arange(seqlen_k) >= torch.tensor([seqlen_k, seqlen_k - 2, 3])[:batch, None]
    square[:, 0] = False
    if kind == "none":
        return {}
    if kind == "bool":
        return {"attn_mask": square}
    if kind == "float":
        return {"attn_mask": torch.randn(seqlen_q, seqlen_k)}
    if kind == "per-head":
        return {"attn_mask": torch.randn(batch * heads, seqlen_q, seqlen_k)}
    if kind == "padding":
        return {"key_padding_mask": padding}
    if kind == "both":
        return {"attn_mask": square, "key_padding_mask": padding}
    return {
        "attn_mask": torch.randn(seqlen_q, seqlen_k),
        "key_padding_mask": padding.double().masked_fill(padding, -torch.inf),
    }


@pytest.mark.parametrize("kind", MASKS)
def test_as_multihead_attention(kind):
    """Outputs, and gradients of inputs and weights. MHA's bool masks mean the opposite of `bias`: True is masked."""
    mha = nn.MultiheadAttention(16, 4, batch_first=True)
    nn.init.normal_(mha.in_proj_bias)
    module = Attention.from_torch(mha)
    x = torch.randn(3, 7, 16, requires_grad=True)
    options = masks(kind, 3, 4, 7, 7)
    expected, _ = mha(x, x, x, need_weights=False, **options)
    out = module(x, **options)
    close(out, expected)
    dout = torch.randn_like(out)
    (dx_expected,) = torch.autograd.grad(expected, x, dout, retain_graph=True)
    (dx,) = torch.autograd.grad(out, x, dout, retain_graph=True)
    close(dx, dx_expected)
    expected.backward(dout)
    out.backward(dout)
    for got, want in zip(in_proj_gradients(module), (mha.in_proj_weight.grad, mha.in_proj_bias.grad)):
        close(got, want)
    for got, want in zip(module.out.parameters(), mha.out_proj.parameters()):
        close(got.grad, want.grad)
    if kind == "bool":
        close(module(x, bias=~options["attn_mask"]), expected)


def test_modules_come_with_the_package():
    code = "import adatom; print(adatom.nn.Attention.__name__, hasattr(adatom, 'nonsense'))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "Attention False\n"
    with pytest.raises(ValueError, match="head_dim of at least 1"):
        Attention(8, 2, head_dim=0)


@pytest.mark.parametrize("bias", [True, False])
def test_cross_attention_with_other_widths(bias):
    mha = nn.MultiheadAttention(16, 2, bias=bias, kdim=5, vdim=6, batch_first=True)
    module = Attention.from_torch(mha)
    q, k, v = torch.randn(2, 4, 16), torch.randn(2, 9, 5), torch.randn(2, 9, 6)
    close(module(q, k, v), mha(q, k, v)[0])
    assert (module.q.bias is not None) == bias == (module.out.bias is not None)


def test_length_first_weights_are_copied():
    mha = nn.MultiheadAttention(16, 2)
    x = torch.randn(5, 3, 16)
    close(Attention.from_torch(mha)(x.transpose(0, 1)).transpose(0, 1), mha(x, x, x)[0])


def test_copies_are_independent():
    mha = nn.MultiheadAttention(16, 2, batch_first=True)
    module, x = Attention.from_torch(mha), torch.randn(2, 3, 16)
    before = module(x)
    with torch.no_grad():
        mha.in_proj_weight.zero_()
        mha.out_proj.weight.zero_()
    assert torch.equal(module(x), before)


def test_grouped_heads_causal_window_and_own_width():
    module = Attention(12, 4, kv_heads=2, head_dim=8, causal=True, window=(3, None), softcap=2.0, scale=0.5)
    x = torch.randn(2, 6, 12)
    q, k, v = (getattr(module, n)(x).unflatten(-1, (-1, 8)).transpose(1, 2) for n in "qkv")
    assert k.shape[1] == 2
    scores = 2.0 * torch.tanh(q @ k.repeat_interleave(2, 1).mT * 0.5 / 2.0)
    i, j = torch.arange(6)[:, None], torch.arange(6)
    p = scores.masked_fill((j > i) | (j < i - 3), -torch.inf).softmax(-1)
    close(module(x), module.out((p @ v.repeat_interleave(2, 1)).transpose(1, 2).flatten(2)))


def test_kv_lens_and_padding_agree():
    module, x = Attention(16, 2), torch.randn(3, 6, 16)
    lens = torch.tensor([6, 4, 1])
    close(module(x, kv_lens=lens), module(x, key_padding_mask=torch.arange(6) >= lens[:, None]))


def test_learned_bias_and_sinks_get_gradients():
    module = Attention(16, 2, sinks=True)
    bias = torch.randn(2, 6, 6, requires_grad=True)
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[1, 4:] = True
    module(torch.randn(3, 6, 16), bias=bias, key_padding_mask=padding).square().sum().backward()
    assert bias.grad.abs().min() > 0 and module.sinks.grad.abs().min() > 0
    assert "heads=2, kv_heads=2, head_dim=8" in repr(module)


def test_refusals():
    with pytest.raises(NotImplementedError, match="no dropout.*0.1"):
        Attention.from_torch(nn.MultiheadAttention(16, 2, dropout=0.1))
    for option in ("add_bias_kv", "add_zero_attn"):
        with pytest.raises(NotImplementedError, match=option):
            Attention.from_torch(nn.MultiheadAttention(16, 2, **{option: True}))
    with pytest.raises(ValueError, match="heads=4, kv_heads=3"):
        Attention(16, 4, kv_heads=3)
    with pytest.raises(ValueError, match="embed_dim=15, heads=4"):
        Attention(15, 4)
    with pytest.raises(ValueError, match=r"\(batch, length, features\).*query=.*\[3, 16\]"):
        Attention(16, 4)(torch.randn(3, 16))
    for mask in (torch.zeros(7, 3, 3), torch.zeros(3)):
        with pytest.raises(ValueError, match=r"attn_mask \(\[batch \* heads,\] seqlen_q, seqlen_k\)"):
            Attention(16, 4)(torch.randn(2, 3, 16), attn_mask=mask)


def test_what_does_not_fit_is_refused_in_words():
    x, layer = torch.randn(4, 5, 16), Attention(16, 2)
    with pytest.raises(ValueError, match=r"key_padding_mask \(batch, seqlen_k\).*bool\[2, 5\]"):
        layer(x, key_padding_mask=torch.zeros(2, 5, dtype=torch.bool))
    for given in ({"query": None}, {"query": x, "key": [1]}, {"query": x, "attn_mask": [1]}):
        with pytest.raises(TypeError, match="expected tensors; got"):
            layer(**given)
    padding, added = torch.zeros(4, 5, dtype=torch.uint8), torch.zeros(5, 5)
    for given in ({"key_padding_mask": padding}, {"attn_mask": added.long()}):  # 0 and 1 must not be added to scores
        with pytest.raises(TypeError, match=r"a mask of bool.*a float one.*(uint8|int64)"):
            layer(x, **{"attn_mask": added, "bias": added, **given})
    for heads in (2.0, "2"):
        with pytest.raises(ValueError, match="heads to be a positive multiple"):
            Attention(16, heads)
    for options in ({"window": 3}, {"softcap": -3.0}, {"scale": "1"}, {"precision": "fp8"}):
        with pytest.raises((TypeError, ValueError), match="adatom: expected.*" + next(iter(options))):
            Attention(16, 2, **options)


@pytest.mark.parametrize("mask", ["attn_mask", "key_padding_mask"])
def test_a_bias_beside_a_mask_is_checked_as_one_alone(mask):
    """Once they are one, 0 and 1 would be added to the scores, and shapes would be those of nothing given."""
    x, layer = torch.randn(4, 5, 16), Attention(16, 4)
    beside = {mask: torch.ones(4 if mask == "key_padding_mask" else 5, 5).tril(1) == 0}
    for bias, error, says in (
        (torch.ones(5, 5).tril().int(), TypeError, r"a mask of bool, or a float one.*bias=int32\[5, 5\]"),
        (1.0, TypeError, "expected tensors; got bias=1.0"),
        (numpy.zeros((5, 5)), TypeError, "expected tensors; got bias=array"),
        (torch.zeros(2, 4, 5, 5), ValueError, r"bias of batch 1 or that of query; got .*bias=float64\[2, 4, 5, 5\]"),
        (torch.zeros(5, 4), ValueError, r"bias that broadcasts.*bias=float64\[5, 4\]"),
        (torch.zeros(5, 5, dtype=torch.float32), TypeError, "a float64 bias with float64 inputs"),
    ):
        with pytest.raises(error, match=says):
            layer(x, bias=bias, **beside)
    square = torch.randn(5, 5)
    close(layer(x, bias=square[None], **beside), layer(x, bias=square.expand(4, 4, 5, 5), **beside))


def test_masks_and_features_that_do_not_fit_are_refused_in_words():
    x, layer = torch.randn(4, 5, 16), Attention(16, 4, key_dim=8)
    with pytest.raises(ValueError, match=r"features\) of \(16, 8, 16\) features; got .*key=float64\[4, 5, 16\]"):
        layer(x)
    layer = Attention(16, 4)
    for shape in ((5, 4), (16, 4, 5), (3, 5, 5)):
        with pytest.raises(ValueError, match=r"attn_mask \(\[batch \* heads,\] seqlen_q, seqlen_k\)"):
            layer(x, attn_mask=torch.zeros(shape))
    with pytest.raises(ValueError, match=r"key_padding_mask \(batch, seqlen_k\).*query=float64\[4, 5, 16\]"):
        layer(x, x[:2], key_padding_mask=torch.zeros(2, 5, dtype=torch.bool))


@pytest.mark.parametrize(
    "make",
    [
        lambda **given: Attention(16, 4, **given), lambda **given: modules.RMSNorm(4, **given),
        lambda **given: modules.LayerNorm(4, **given), lambda **given: modules.Linear(4, 4, **given),
        lambda **given: modules.GatedMLP(4, 4, **given), lambda **given: modules.MoE(4, 4, 2, 1, **given),
    ],
    ids=["attention", "rms_norm", "layer_norm", "linear", "gated", "moe"],
)  # fmt: skip
def test_constructors_refuse_backends_that_there_are_not(make):
    with pytest.raises(ValueError, match="no backend 'nope' for .*; there are: .*reference"):
        make(backend="nope")
    with pytest.raises(TypeError, match="a backend by name, or None; got backend=1"):
        make(backend=1)
    for backend in ("triton", "deterministic", "reference"):
        make(backend=backend)


def test_constructors_refuse_what_every_call_would():
    for sizes in ({"embed_dim": "16"}, {"embed_dim": 16.0}, {"key_dim": 0}, {"value_dim": True}):
        with pytest.raises(ValueError, match=f"numbers of features, at least 1; got .*{list(sizes)[0]}="):
            Attention(**{"embed_dim": 16, "heads": 4, **sizes})
    for eps in (-1.0, float("nan"), "1"):
        for norm in (modules.RMSNorm, modules.LayerNorm):
            with pytest.raises(ValueError, match=f"a finite eps >= 0; got eps={eps!r}"):
                norm(4, eps=eps)
    with pytest.raises(ValueError, match="a finite eps >= 0; got eps=None"):
        modules.LayerNorm(4, eps=None)
    with pytest.raises(TypeError, match=r"an nn.MultiheadAttention; got mha=Linear\("):
        Attention.from_torch(nn.Linear(2, 2))
    for norm in (modules.RMSNorm(16), modules.RMSNorm(16, eps=None), modules.LayerNorm(16)):
        with pytest.raises(TypeError, match="expected tensors; got x=None"):
            norm(None)


@pytest.mark.parametrize("apart", [False, True])
def test_a_copy_keeps_frozen_weights_frozen(apart):
    theirs = torch.nn.MultiheadAttention(16, 4, kdim=8 if apart else None, batch_first=True)
    (theirs.q_proj_weight if apart else theirs.in_proj_weight).requires_grad_(False)
    theirs.out_proj.bias.requires_grad_(False)
    frozen = {name for name, p in Attention.from_torch(theirs).named_parameters() if not p.requires_grad}
    assert frozen == ({"q.weight"} if apart else {"q.weight", "k.weight", "v.weight"}) | {"out.bias"}


def test_sinks_reset_as_parameters_do():
    with torch.device("meta"):
        module = Attention(8, 2, sinks=True)
    module.to_empty(device="cpu").sinks.data.fill_(7.0)
    module.reset_parameters()
    assert module.sinks.requires_grad and module.sinks.tolist() == [0.0, 0.0]


def test_projections_may_hold_some_of_the_heads():
    """As tensor parallelism leaves them: halves add up to the whole."""
    whole, x = Attention(12, 4, kv_heads=2, head_dim=3, out_bias=False), torch.randn(2, 5, 12)
    total = torch.zeros(2, 5, 12)
    for half in range(2):
        part = Attention(12, 4, kv_heads=2, head_dim=3, out_bias=False)
        for name in "qkv":
            layer, of = getattr(part, name), getattr(whole, name)
            layer.weight = nn.Parameter(of.weight.chunk(2)[half])
            layer.bias = nn.Parameter(of.bias.chunk(2)[half])
        part.out.weight = nn.Parameter(whole.out.weight.chunk(2, 1)[half])
        total += part(x)
    close(total, whole(x))


class Halves(torch.Tensor):
    """A weight in 16 bits of which PyTorch's `linear` alone knows, as quantised ones are."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)

    def __init__(self, data):
        self.data16 = data.detach().half()

    def __tensor_flatten__(self):
        return ["data16"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Halves(inner["data16"])

    def dequantize(self):
        return self.data16.to(self.dtype)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            return nn.functional.linear(args[0], args[1].dequantize(), *args[2:])
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        raise NotImplementedError(function)


class Adapted(nn.Module):
    """A layer with a small one beside it, whose `weight` is the layer's."""

    def __init__(self, base):
        super().__init__()
        self.base, self.beside = base, nn.Linear(base.in_features, base.out_features)

    @property
    def weight(self):
        return self.base.weight

    def forward(self, x):
        return self.base(x) + self.beside(x)


@pytest.mark.parametrize("layer", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("change", ["adapter", "bias", "hook", "instance", "prune", "ours"])
def test_layers_of_a_gated_mlp_that_are_not_plain_are_called(layer, change):
    module, x = modules.GatedMLP(6, 8, activation="gelu"), torch.randn(3, 6)
    before, old = module(x), getattr(module, layer)
    called = []
    if change == "adapter":
        setattr(module, layer, Adapted(old))
    elif change == "bias":
        old.bias = nn.Parameter(torch.randn(old.out_features))
    elif change == "hook":
        old.register_forward_hook(lambda *given: called.append(layer))
    elif change == "instance":
        old.forward = lambda x: 2 * nn.functional.linear(x, old.weight)
    elif change == "prune":
        prune.l1_unstructured(old, "weight", 0.5)
    else:
        setattr(module, layer, modules.Linear(old.in_features, old.out_features, bias=False, activation="relu"))
    gate, up, down = module.gate_proj, module.up_proj, module.down_proj
    expected = down(nn.functional.gelu(gate(x)) * up(x))
    called.clear()
    found = module(x)
    close(found, expected)
    assert called == ([layer] if change == "hook" else [])
    assert (change == "hook") == torch.allclose(found, before)
    ours = torch.autograd.grad(found.sum(), list(module.parameters()))
    for a, b in zip(ours, torch.autograd.grad(expected.sum(), list(module.parameters()))):
        close(a, b)
    module.options["backend"] = "triton"
    with pytest.raises(NotImplementedError, match="layers that are not plain"):
        module(x)


def test_plain_layers_of_a_gated_mlp_are_one_call(monkeypatch):
    calls = []
    monkeypatch.setattr(modules, "mlp", lambda x, *weights, **options: calls.append(len(weights)) or x)
    module = modules.GatedMLP(6, 8)
    module.up_proj = modules.Linear(6, 8, bias=False)
    nn.utils.parametrize.register_parametrization(module.gate_proj, "weight", nn.Identity())
    module(torch.randn(2, 6))
    assert calls == [3]


@pytest.mark.parametrize("make", [modules.GatedMLP, partial(modules.Linear, activation="gelu_tanh")])
def test_quantised_weights_go_to_operators_that_know_them(make):
    module, x = make(6, 8), torch.randn(3, 6)
    before = module(x)
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    for layer in layers:
        layer.weight = nn.Parameter(Halves(layer.weight), requires_grad=False)
    after = module(x)
    assert 0 < (after - before).abs().max() < 1e-2
    for layer in layers:
        layer.weight = nn.Parameter(layer.weight.dequantize())
    close(module(x), after)


def test_a_gated_mlp_with_an_adapter_compiles_whole():
    module, x = modules.GatedMLP(6, 8), torch.randn(3, 6)
    for layer in (module.down_proj, Adapted(module.down_proj)):
        module.down_proj = layer
        close(torch.compile(module, fullgraph=True, backend="aot_eager")(x), module(x))


def test_tensors_of_several_processes_are_refused_in_words():
    from torch.distributed.tensor import DTensor, Replicate

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        x = DTensor.from_local(torch.randn(2, 3, 4), mesh, [Replicate()])
        for call in (modules.Linear(4, 5), modules.RMSNorm(4), lambda x: modules.attention(*[x[:, None]] * 3)):
            with pytest.raises(TypeError, match="no DTensor"):
                call(x)
    finally:
        torch.distributed.destroy_process_group()
