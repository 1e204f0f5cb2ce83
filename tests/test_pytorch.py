"""PyTorch's tools work on attention: opcheck, compile, meta tensors, autocast, forward mode, vmap, transforms."""

import math
import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import adatom
import adatom.nn
from adatom.compat.flash_attn import flash_attn_varlen_func
from adatom.ops.attention import op
from adatom.ops.attention.api import inputs_of

F64 = torch.float64


pytestmark = pytest.mark.usefixtures("one_thread")


def differentiable(args):
    for arg in args:
        floats = isinstance(arg, torch.Tensor) and arg.is_floating_point()
        yield arg.detach().clone().requires_grad_() if floats else arg


def operands(kind):
    """The arguments of the operators, for a call with every optional tensor, with none, and for a packed one."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, dtype=F64, generator=g)

    if kind == "packed":
        call = {"q": normal(6, 4, 8), "k": normal(9, 2, 8), "v": normal(9, 2, 8), "sinks": normal(4), "causal": True}
        call |= {"cu_seqlens_q": torch.tensor([0, 2, 6]), "cu_seqlens_k": torch.tensor([0, 5, 9])}
    else:
        call = {"q": normal(2, 4, 5, 8), "k": normal(2, 2, 7, 8), "v": normal(2, 2, 7, 3)}
        if kind == "all":
            call |= {"bias": normal(1, 4, 1, 7), "sinks": normal(4), "kv_lens": torch.tensor([7, 2]), "causal": True}
            call |= {"window": (3, None), "softcap": 2.0}
        if kind == "heads inside":
            call |= {n: x.transpose(1, 2).clone().transpose(1, 2) for n, x in call.items()}
            call |= {"bias": normal(2, 5, 7, 4).permute(0, 3, 1, 2)}  # as a Linear of pairs gives it
    x, o, backend = inputs_of(**call)
    call = (*x, *o, backend)
    with torch.no_grad():
        out, lse = op.attention_fwd(*call)
    like = [None if t is None else torch.randn(t.shape, dtype=F64, generator=g) for t in x[:5]]
    dout, dlse = (torch.randn(t.shape, dtype=F64, generator=g) for t in (out, lse))
    bias_grad = x.bias is not None
    yield op.attention_fwd, call
    yield op.attention_jvp, (*call, out, lse, *like)
    yield op.attention_bwd, (*call, out, lse, dout, dlse if kind == "all" else None, bias_grad)
    yield op.attention_bwd_bwd, (*call, out, lse, dout, dlse if kind == "all" else None, *like, bias_grad)
    yield op.attention_compiled, call
    yield op.attention_compiled, tuple(differentiable(call))
    yield torch.ops.adatom.attention_grad.default, tuple(differentiable((*call, out, lse, dout, None, bias_grad)))


@pytest.mark.parametrize("kind", ["none", "all", "packed", "heads inside"])
def test_operators_pass_opcheck(kind):
    """Schemas, fakes and their strides; autograd's registration where it does not lie in Functions around operators."""
    for operator, args in operands(kind):
        tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        if operator is op.attention_compiled:
            tests += ("test_autograd_registration",)
        assert set(torch.library.opcheck(operator, args, test_utils=tests).values()) == {"SUCCESS"}, operator


_PAIRS = """
import torch, adatom
q, k, v = (torch.randn(2, 2, 20, 16) for _ in range(3))
z, w = torch.randn(2, 20, 20, 8), torch.randn(2, 8)
leaves = [t.requires_grad_() for t in (q, k, v, z, w)]
def f(q, k, v, z, w):
    bias = torch.nn.functional.linear(z, w).permute(0, 3, 1, 2)
    return adatom.attention(q, k, v, bias=bias, backend="triton").square().sum()
compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
for a, b in zip(torch.autograd.grad(compiled(*leaves), leaves), torch.autograd.grad(f(*leaves), leaves)):
    torch.testing.assert_close(a, b)
"""


def test_compile_knows_how_kernels_lay_out_the_gradient_of_a_bias():
    """That of a permuted bias is contiguous; who was told otherwise views it as what it is not."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", _PAIRS], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend):
    """One graph, forward and backward, around an attention that needs every kind of gradient."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (2, 4, 5, 8), "k": (2, 2, 7, 8), "v": (2, 2, 7, 8), "bias": (4, 5, 7), "sinks": (4,)}
    leaves = [torch.randn(s, generator=generator).requires_grad_() for s in shapes.values()]
    kv_lens = torch.tensor([7, 3])

    def f(q, k, v, bias, sinks):
        out, lse = adatom.attention(
            q * 2, k, v, bias=bias, sinks=sinks, kv_lens=kv_lens, causal=True, softcap=3.0, return_lse=True
        )
        return out.sin().sum() + lse.where(lse > -1e30, 0).cos().sum()

    torch.compiler.reset()
    compiled = torch.compile(f, fullgraph=True, backend=backend)
    expected, got = f(*leaves), compiled(*leaves)
    torch.testing.assert_close(got, expected)
    for a, b in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(expected, leaves)):
        torch.testing.assert_close(a, b)


def test_compile_one_tensor_for_all():
    """Self-attention without projections, padded and packed."""
    torch.compiler.reset()
    x = torch.randn(2, 3, 6, 8, requires_grad=True)
    padded = torch.compile(lambda x: adatom.attention(x, x, x, causal=True), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(padded(x), adatom.attention(x, x, x, causal=True))
    cu, y = torch.tensor([0, 2, 6]), torch.randn(6, 3, 8, requires_grad=True)
    packed = torch.compile(lambda y: adatom.attention_varlen(y, y, y, cu, cu), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(packed(y), adatom.attention_varlen(y, y, y, cu, cu))


def energy(x, w):
    return adatom.attention(x @ w, x, x, causal=True).square().sum()


def mismatch(x, w):
    """A loss of forces: its gradient by w differentiates attention twice."""
    (force,) = torch.autograd.grad(energy(x, w), x, create_graph=True)
    return force.square().mean()


def operands_of_energy():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, dtype=F64, generator=generator).requires_grad_() for shape in ((1, 2, 8, 4), (4, 4))]


@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="this PyTorch does not trace torch.autograd.grad"
)
@pytest.mark.parametrize("step", ["loss", "gradient of the loss"])
def test_compile_energy_and_forces(step):
    """One graph of an energy, its forces, and the gradient of a loss of forces."""

    def gradient(x, w):
        return torch.autograd.grad(mismatch(x, w), w)[0]

    def of_compiled_loss(x, w):
        return torch.autograd.grad(torch.compile(mismatch, fullgraph=True, backend="aot_eager")(x, w), w)[0]

    x, w = operands_of_energy()
    whole = torch.compile(gradient, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        torch.compiler.reset()
        got = (of_compiled_loss if step == "loss" else whole)(x, w)
    torch.testing.assert_close(got, gradient(x, w))


def test_transforms_inside_a_compiled_region():
    """torch.func.grad of torch.func.grad leaves the graph, or says so: a Function traced there would lose a term."""
    x, w = (t.detach() for t in operands_of_energy())

    def loss(w):
        return torch.func.grad(lambda x: energy(x, w))(x).square().mean()

    torch.compiler.reset()
    torch.testing.assert_close(
        torch.compile(torch.func.grad(loss), backend="aot_eager")(w), torch.func.grad(loss)(w), msg="wrong gradient"
    )
    torch.compiler.reset()
    with pytest.raises(Exception, match="no torch.func transform inside a compiled region"):
        torch.compile(torch.func.grad(loss), fullgraph=True, backend="aot_eager")(w)


def test_compile_with_dynamic_lengths():
    torch.compiler.reset()
    compiled = torch.compile(
        lambda q, k: adatom.attention(q, k, k, causal=True), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for seqlen in (5, 9, 14):
        q, k = torch.randn(2, 2, seqlen, 8), torch.randn(2, 2, seqlen + 3, 8)
        torch.testing.assert_close(compiled(q, k), adatom.attention(q, k, k, causal=True))


def test_an_exported_window_takes_any_length():
    """Also those that it is wider than."""
    layer, lengths = adatom.nn.Attention(16, 2, causal=True, window=(4, None)), torch.export.Dim("lengths")
    program = torch.export.export(layer, (torch.randn(2, 9, 16),), dynamic_shapes=({1: lengths},)).module()
    for seqlen in (3, 20):
        x = torch.randn(2, seqlen, 16)
        torch.testing.assert_close(program(x), layer(x))


@pytest.mark.parametrize("rows", [False, True])
def test_an_exported_bias_takes_any_length(rows):
    """Also in names for lengths that have no bounds, and of 5-D tensors."""

    class Biased(torch.nn.Module):
        def forward(self, x, bias):
            return adatom.attention(x.transpose(-2, -3), *[x.transpose(-2, -3)] * 2, bias=bias)

    def given(n):
        lead = (3, 2) if rows else (2,)
        return torch.randn(*lead, n, 2, 8), torch.randn(*[1] * len(lead), 2, n, n)

    n = torch.export.Dim("n")
    lengths = {1 + rows: n}, {2 + rows: n, 3 + rows: n}
    program = torch.export.export(Biased(), given(9), dynamic_shapes=lengths).module()
    x, bias = given(11)
    torch.testing.assert_close(program(x, bias), Biased()(x, bias))


@pytest.mark.parametrize("capacity", [None, 3])
def test_an_exported_mixture_takes_any_number_of_tokens(capacity):
    layer, tokens = adatom.nn.MoE(6, 4, 4, 2, shared=3, capacity=capacity), torch.export.Dim("tokens")
    program = torch.export.export(layer, (torch.randn(9, 6),), dynamic_shapes=({0: tokens},)).module()
    for n in (9, 2, 40):
        x = torch.randn(n, 6)
        torch.testing.assert_close(program(x), layer(x))


def test_compile_with_options_that_change():
    """A scale that differs from call to call becomes a symbol."""
    torch.compiler.reset()
    q = torch.randn(1, 2, 5, 8)
    compiled = torch.compile(adatom.attention, fullgraph=True, backend="aot_eager")
    for scale in (0.1, 0.2, 0.3):
        got = compiled(q, q, q, scale=scale, softcap=10 * scale)
        torch.testing.assert_close(got, adatom.attention(q, q, q, scale=scale, softcap=10 * scale))


MODULES = {
    "attention": lambda: adatom.nn.Attention(16, 2),
    "linear": lambda: adatom.nn.Linear(16, 8, activation="gelu"),
    "gated": lambda: adatom.nn.GatedMLP(16, 8),
    "moe": lambda: adatom.nn.MoE(16, 8, 4, 2),
    "norm": lambda: adatom.nn.RMSNorm(16),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_batch_of_any_size_is_compiled_once(name):
    """Shapes stay symbols: a size that is fixed while tracing would compile again for each."""
    torch.compiler.reset()
    module, counter = MODULES[name](), torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for batch in (3, 5, 6):
        x = torch.randn(batch, 4, 16)
        torch._dynamo.mark_dynamic(x, 0)
        y = compiled(x)
        torch.testing.assert_close(y, module(x))
        y.sum().backward()
    assert counter.frame_count == 1


def test_meta_tensors_give_shapes():
    q, k, v = (torch.empty(2, 4, n, d, device="meta", dtype=torch.bfloat16) for n, d in ((5, 8), (7, 8), (7, 16)))
    out, lse = adatom.attention(q.requires_grad_(), k, v, return_lse=True)
    assert out.shape == (2, 4, 5, 16) and out.dtype == torch.bfloat16 and lse.shape == (2, 4, 5)
    out.sum().backward()
    assert q.grad.shape == q.shape


@pytest.mark.parametrize("packed", [False, True])
def test_lengths_without_values(packed):
    """Of fake tensors, and of those that FX follows: there is nothing to check."""

    def call(x, n):
        return flash_attn_varlen_func(x, x, x, n, n, 9, 9) if packed else adatom.attention(x, x, x, kv_lens=n)

    x, n = torch.randn(9, 2, 4) if packed else torch.randn(3, 2, 9, 4), torch.tensor([0, 5, 9])
    with FakeTensorMode() as fake:
        assert call(fake.from_tensor(x), fake.from_tensor(n)).shape == x.shape
    torch.testing.assert_close(make_fx(call)(x, n)(x, n), call(x, n))


@pytest.mark.parametrize("lengths", [[0, 5, 20], [3, 5, 9]])
def test_lengths_with_values_are_checked(lengths):
    """Of Parameters, too, and where something looks on that leaves tensors as they are."""
    x, n = torch.randn(9, 2, 4), torch.nn.Parameter(torch.tensor(lengths), requires_grad=False)
    for context in (nullcontext(), FlopCounterMode(display=False)):
        with context, pytest.raises(ValueError, match="cu_seqlens_q to start at 0"):
            adatom.attention_varlen(x, x, x, n, n)
        with context, pytest.raises(ValueError, match="kv_lens between 0"):
            adatom.attention(*[torch.randn(3, 2, 4, 8)] * 3, kv_lens=n)


def test_autocast_as_sdpa():
    q, k = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 7, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = adatom.attention(q, k, k)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, k)
        untouched = adatom.attention(q.double(), k.double(), k.double())
    assert out.dtype == expected.dtype == torch.bfloat16 and untouched.dtype == F64
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # mixed inputs meet in autocast's dtype
        assert adatom.attention(q.requires_grad_(), k.bfloat16(), k.half()).dtype == torch.bfloat16
        adatom.attention(q, k, k).sum().backward()
    assert q.grad.dtype == torch.float32


@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 2.0}, {"causal": True}, {"sinks": True}, {"bias": True}],
    ids=lambda o: "-".join(o) or "plain",
)
def test_autocast_casts_what_operators_take_and_nothing_inside(options):
    """Every order under autocast gives what it gives outside for tensors of autocast's dtype, bit for bit."""
    made = {"bias": torch.randn(2, 5, 7, requires_grad=True), "sinks": torch.randn(2)}
    options = {name: made.get(name, value) for name, value in options.items()}
    q, k = torch.randn(2, 2, 5, 8, requires_grad=True), torch.randn(2, 2, 7, 8, requires_grad=True)

    def orders(cast):
        out = adatom.attention(*(t.bfloat16() if cast else t for t in (q, k, k)), **options)
        first = torch.autograd.grad(out.float().square().sum(), (q, k), create_graph=True)
        return out, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), (q, k))

    with torch.autocast("cpu", torch.bfloat16):
        inside = orders(cast=False)
    for got, want in zip(inside, orders(cast=True)):
        assert torch.equal(got, want)


@pytest.mark.parametrize("filled", [True, False])
@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_mode_fills_no_tensor_of_a_launch(monkeypatch, deterministic, filled):
    """Each element of which is written; and the setting is what it was afterwards, also when a launch raises."""
    setting = torch.utils.deterministic
    x, seen = torch.randn(1, 2, 5, 8, requires_grad=True), []

    def spy(launch, like, *args):
        def watched(*args):
            seen.append(setting.fill_uninitialized_memory)
            return launch(*args)

        return on_device(watched, like, *args)

    def fail():
        raise ZeroDivisionError

    on_device = op.on_device
    monkeypatch.setattr(op, "on_device", spy)
    before, mode = setting.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(deterministic)
        setting.fill_uninitialized_memory = filled
        adatom.attention(x, x, x, backend="torch").sum().backward()
        assert x.grad.isfinite().all() and setting.fill_uninitialized_memory == filled
        with pytest.raises(ZeroDivisionError):
            on_device(fail, x)
        assert setting.fill_uninitialized_memory == filled
    finally:
        torch.use_deterministic_algorithms(mode)
        setting.fill_uninitialized_memory = before
    assert seen and set(seen) == {filled and not deterministic}


def plain(q, k, v):
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


@pytest.mark.parametrize("recording", [True, False])
def test_vmap(recording):
    q, k = torch.randn(3, 2, 2, 5, 8, dtype=F64), torch.randn(2, 3, 2, 7, 8, dtype=F64)
    bias = torch.randn(3, 5, 7, dtype=F64)
    with torch.set_grad_enabled(recording):
        out = torch.vmap(lambda q, k, b: adatom.attention(q, k, k, bias=b), in_dims=(0, 1, 0))(q, k, bias)
    expected = torch.stack([adatom.attention(q[i], k[:, i], k[:, i], bias=bias[i]) for i in range(3)])
    torch.testing.assert_close(out, expected)


def test_vmap_over_lengths():
    q, lens = torch.randn(2, 2, 5, 8, dtype=F64), torch.tensor([[1, 5], [0, 3]])
    got = torch.vmap(lambda n: adatom.attention(q, q, q, kv_lens=n))(lens)
    torch.testing.assert_close(got, torch.stack([adatom.attention(q, q, q, kv_lens=n) for n in lens]))


def test_gradients_over_lengths():
    """vmap over grad, which wraps the lengths as well: nobody may look into them."""
    q, lens = torch.randn(2, 2, 5, 8, dtype=F64), torch.tensor([[1, 5], [0, 3]])
    packed, cu = torch.randn(7, 2, 8, dtype=F64), torch.tensor([[0, 2, 7], [0, 7, 7]])

    def padded(q, n):
        return adatom.attention(q, q, q, kv_lens=n).square().sum()

    def ragged(x, cu):
        return flash_attn_varlen_func(x, x, x, cu, cu, 7, 7).square().sum()

    for loss, x, each in ((padded, q, lens), (ragged, packed, cu)):
        got = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(x, each)
        torch.testing.assert_close(got, torch.stack([torch.func.grad(loss)(x, n) for n in each]))


def test_vmap_over_nothing():
    q, k, bias = torch.randn(0, 2, 2, 5, 8), torch.randn(2, 0, 2, 7, 8), torch.randn(5, 7)

    def loss(q, k, bias):
        return adatom.attention(q, k, k[..., :4], bias=bias).square().sum()

    out = torch.vmap(lambda q, k: adatom.attention(q, k, k[..., :4], return_lse=True), in_dims=(0, 1))(q, k)
    assert [x.shape for x in out] == [(0, 2, 2, 5, 4), (0, 2, 2, 5)]
    grads = torch.vmap(torch.func.grad(loss, (0, 1, 2)), in_dims=(0, 1, None))(q, k, bias)
    assert [x.shape for x in grads] == [(0, 2, 2, 5, 8), (0, 2, 2, 7, 8), (0, 5, 7)]
    weight = torch.randn(3, 8)
    assert torch.vmap(lambda x: adatom.linear(x, weight))(q).shape == (0, 2, 2, 5, 3)


def test_tangents_of_many_directions():
    """vmap over jvp: the columns of a Jacobian at once."""
    q, k = torch.randn(1, 2, 5, 8, dtype=F64), torch.randn(1, 2, 7, 8, dtype=F64)
    directions = torch.randn(3, *q.shape, dtype=F64)

    def f(attention):
        return torch.vmap(lambda t: torch.func.jvp(lambda q: attention(q, k, k), (q,), (t,))[1])(directions)

    torch.testing.assert_close(f(adatom.attention), f(plain))


def test_gradients_of_each_sample():
    x = torch.randn(3, 1, 2, 5, 8, dtype=F64)

    def f(attention):
        return torch.vmap(torch.func.grad(lambda x: attention(x, x, x).square().sum()))(x)

    got, want = f(adatom.attention), f(plain)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.jacfwd, torch.func.hessian])
def test_whole_jacobians(transform):
    x = torch.randn(1, 1, 3, 4, dtype=F64)

    def f(attention):
        return transform(lambda x: attention(x, x, x).square().sum((0, 1, 3)))(x)

    got, want = f(adatom.attention), f(plain)
    torch.testing.assert_close(got, want)


LAYERS = {
    "linear": lambda x: adatom.linear(x, torch.ones(3, 4), activation="gelu"),
    "gated": lambda x: adatom.swiglu(x, torch.ones(3, 4), torch.ones(3, 4)),
    "moe": lambda x: adatom.moe(x, x[:, :2], torch.ones(2, 6, 4), torch.ones(2, 4, 3), top_k=1),
}


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_transforms_of_layers_in_a_compiled_region(layer):
    """It runs uncompiled, or says why not."""
    x = torch.randn(5, 4)
    slope = torch.func.grad(lambda x: layer(x).sin().sum())
    torch._dynamo.reset()
    assert torch.equal(torch.compile(slope, backend="aot_eager")(x), slope(x))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="no torch.func transform inside a compiled region"):
        torch.compile(slope, backend="aot_eager", fullgraph=True)(x)
