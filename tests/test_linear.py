"""linear(): values and derivatives of every order on the CPU, what callers may rely on, and bad input."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import adatom
import adatom.nn
from adatom import verify
from adatom.device import Device, pretend
from adatom.ops.linear import cases, reference
from adatom.ops.linear.api import inputs_of
from adatom.ops.linear.problem import ACTIVATIONS, Options, problem
from adatom.registry import Row, choose, rows

F64 = torch.float64
EAGER = {
    None: lambda z: z,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}
H100 = Device("cuda", 90, 132, 232448)

pytestmark = pytest.mark.usefixtures("one_thread")


def tensors(*shapes, dtype=F64, grad=True):
    return [torch.randn(s, dtype=dtype).requires_grad_(grad) for s in shapes]


@pytest.mark.parametrize("activation", EAGER)
@pytest.mark.parametrize("recompute", [False, True])
def test_values_and_gradients_are_eager_pytorchs(activation, recompute):
    x, w, b = tensors((2, 3, 5), (7, 5), (7,))
    out = adatom.linear(x, w, b, activation=activation, recompute=recompute)
    expected = EAGER[activation](F.linear(x, w, b))
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(expected)
    for got, want in zip(torch.autograd.grad(out, (x, w, b), dout), torch.autograd.grad(expected, (x, w, b), dout)):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_derivatives_of_activations(name):
    z = torch.linspace(-6, 6, 40, dtype=F64).add_(0.01).requires_grad_()
    a = EAGER[None if name == "none" else name](z)
    torch.testing.assert_close(reference.activation(z, name), a)
    (first,) = torch.autograd.grad(a.sum(), z)
    torch.testing.assert_close(reference.first(z, name), first)
    (second,) = torch.autograd.grad(reference.first(z, name).sum() + 0 * z.sum(), z)
    torch.testing.assert_close(reference.second(z, name), second)


@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("recompute", [False, True])
def test_first_and_second_derivatives(activation, recompute):
    def f(x, w, b):
        return adatom.linear(x, w, b, activation=activation, recompute=recompute)

    given = tensors((3, 4), (5, 4), (5,))
    torch.autograd.gradcheck(f, given)
    torch.autograd.gradgradcheck(f, given)


def test_second_derivatives_of_some_inputs():
    x, w, b = tensors((3, 4), (5, 4), (5,))
    for wanted in ((0,), (1,), (2,), (0, 2)):
        given = [t if i in wanted else t.detach() for i, t in enumerate((x, w, b))]
        torch.autograd.gradgradcheck(lambda *a: adatom.linear(*a, activation="gelu"), given)


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_third_derivative(dtype):
    x, w = tensors((2, 3), (4, 3), dtype=dtype)

    def f(linear):
        first = torch.autograd.grad(linear(x, w).square().sum(), x, create_graph=True)[0]
        second = torch.autograd.grad(first.square().sum(), w, create_graph=True)[0]
        return torch.autograd.grad(second.square().sum(), (x, w))

    ours = f(lambda x, w: adatom.linear(x, w, activation="silu"))
    for got, want in zip(ours, f(lambda x, w: F.silu(x @ w.mT))):
        torch.testing.assert_close(got, want, rtol=1e-7 if dtype == F64 else 1e-4, atol=1e-7)


class _Seen(TorchDispatchMode):
    """The operators that are called, with their arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.calls.append((op.name(), args))
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_second_derivatives_of_float32_multiply_as_precision_says(gated, precision):
    """PyTorch would on a GPU as torch.backends says: the operator multiplies, for third derivatives too."""
    x, w, v = tensors((3, 6, 4), (5, 4), (5, 4), dtype=torch.float32)
    options = {"precision": precision, "backend": "reference"}
    given = (x, w, v) if gated else (x, w)
    with _Seen() as seen:
        out = adatom.swiglu(*given, **options) if gated else adatom.linear(*given, activation="gelu", **options)
        first = torch.autograd.grad(out.square().sum(), given, create_graph=True)
        before = len(seen.calls)
        second = torch.autograd.grad(sum(g.sin().sum() for g in first), given, create_graph=True)
        products = [args for name, args in seen.calls[before:] if name == "adatom::linear_fwd"]
        torch.autograd.grad(sum(g.square().sum() for g in second), given)
    assert len(products) == 7 and all(args[6:8] == (precision, "reference") for args in products)
    assert not {name for name, _ in seen.calls} & {"aten::mm", "aten::addmm", "aten::bmm", "aten::matmul"}


@pytest.mark.parametrize("gated", [False, True])
def test_second_derivatives_in_float32_and_bfloat16(gated):
    """Of results whose gradients are expanded, too."""

    def second(dtype):
        torch.manual_seed(0)
        x, w, v = tensors((3, 6, 4), (5, 4), (5, 4))
        given = [t.detach().to(dtype).requires_grad_() for t in (x, w, v)[: 2 + gated]]
        out = adatom.swiglu(*given) if gated else adatom.linear(*given, activation="silu")
        first = torch.autograd.grad(out.square().sum(), given, create_graph=True)
        return torch.autograd.grad(sum(g.sum() for g in first), given)

    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        for got, want in zip(second(dtype), second(F64)):
            assert got.dtype == dtype and (got.double() - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize("case", cases.SMALL, ids=lambda case: case.name)
def test_cpu_rows_are_right(case):
    results = verify.examine_case(case, rows("linear_fwd") + rows("linear_bwd"), torch.device("cpu"))
    assert {r.backend for r in results} == {"torch", "reference"}
    assert all(r.ok for r in results), [r for r in results if not r.ok]


def _without_bias(x, o, keep):
    return reference.forward(x._replace(bias=None), o, keep)


def _unfinished(x, o, kept, dout, needs):
    return reference.backward(x, o, kept, dout * 1.01, needs)


@pytest.mark.parametrize("op, wrong", [("linear_fwd", _without_bias), ("linear_bwd", _unfinished)])
def test_wrong_kernels_are_refused(op, wrong):
    case = next(c for c in cases.SMALL if c.name == "f32 gelu")
    row = Row(op, "wrong", wrong, lambda problem: None)
    assert not any(r.ok for r in verify.examine_case(case, [row], torch.device("cpu")))


@pytest.mark.parametrize("activation, kept", [(None, 0), ("relu", 0), ("gelu", 1), ("silu", 1)])
def test_what_is_kept_for_the_backward(activation, kept):
    """Nothing but the inputs, and what the activation was given only where its derivative needs it."""

    def elements(**options):
        saved = []
        x, w = tensors((6, 4), (5, 4))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            out = adatom.linear(x, w, activation=activation, **options)
        return sum(t.numel() for t in saved if t.shape == (6, 5) and t.data_ptr() != out.data_ptr())

    assert elements() == 30 * kept
    assert elements(recompute=True) == 0


def test_what_was_kept_is_overwritten_where_nobody_needs_it(monkeypatch):
    """Only in a backward that frees the graph, only what the activation was given, and not if hooks have seen it."""
    from adatom.ops.linear import op

    launch, spent = op._launch, []

    def watched(which, *args):
        if which == "bwd":
            spent.append(args[-1])
        return launch(which, *args)

    monkeypatch.setattr(op, "_launch", watched)
    x, w = tensors((6, 4), (5, 4))

    def backward(activation="gelu", hooks=False, **options):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone) if hooks else nullcontext():
            out = adatom.linear(x, w, activation=activation)
        return out, torch.autograd.grad(out.sum(), (x, w), **options)

    out, _ = backward(retain_graph=True)
    torch.autograd.grad(out.sum(), (x, w))
    assert spent == [False, True]
    backward()
    backward(activation="relu")
    backward(hooks=True)
    backward(create_graph=True)
    assert spent[2:] == [True, False, False, False]


def test_a_backward_that_failed_is_not_repeated_with_what_it_left(monkeypatch):
    from adatom.ops.linear import op

    launch = op._launch

    def fails(which, *args):
        grads = launch(which, *args)
        if which == "bwd":
            raise torch.OutOfMemoryError("as late as may be")
        return grads

    x, w = tensors((6, 4), (5, 4))
    out = adatom.linear(x, w, activation="gelu")
    monkeypatch.setattr(op, "_launch", fails)
    with pytest.raises(torch.OutOfMemoryError):
        out.backward(torch.ones_like(out))
    monkeypatch.setattr(op, "_launch", launch)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(torch.ones_like(out))


def test_weight_grad_accumulates():
    x, w, b = tensors((3, 6, 4), (5, 4), (5,), dtype=torch.float32)
    buffer = torch.ones(5, 4)
    total = buffer.clone()
    for _ in range(2):
        out = adatom.linear(x, w, b, activation="gelu", weight_grad=buffer)
        out.square().sum().backward()
        total += torch.autograd.grad(F.gelu(F.linear(x, w, b)).square().sum(), w)[0]
    assert w.grad is None and x.grad is not None and b.grad is not None
    torch.testing.assert_close(buffer, total)
    loss = adatom.linear(x, w, b, weight_grad=buffer).sum()
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_weight_grad_of_lower_precision():
    x, w = tensors((64, 16), (8, 16), dtype=torch.bfloat16)
    buffer = torch.zeros(8, 16)
    adatom.linear(x, w, weight_grad=buffer).sum().backward()
    torch.testing.assert_close(buffer, x.float().sum(0).expand(8, 16), rtol=1e-5, atol=1e-5)
    before = buffer.clone()
    adatom.linear(x, w.detach(), weight_grad=buffer).sum().backward()  # a frozen weight
    assert torch.equal(buffer, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled(dtype):
    x, w, b = tensors((4, 6), (5, 6), (5,), dtype=dtype)

    def step(x, w, b):
        return adatom.linear(x, w, b, activation="gelu") * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    got, want = compiled(x, w, b), step(x, w, b)
    torch.testing.assert_close(got, want)
    for g, e in zip(torch.autograd.grad(got.sum(), (x, w, b)), torch.autograd.grad(want.sum(), (x, w, b))):
        torch.testing.assert_close(g, e)


@pytest.mark.parametrize("activation, bias", [("gelu", True), ("relu", True), ("none", False)])
def test_opcheck(activation, bias):
    x, w, b = tensors((2, 3, 6), (5, 6), (5,), dtype=torch.float32)
    b = b if bias else None
    call = (x, w, None, b, activation, False, "tf32x3", None)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.adatom.linear_fwd.default, (*call, True, None), test_utils=tests[:3])
    kept = None if activation == "none" else torch.randn(6, 5)
    given = (*call, kept, torch.randn(2, 3, 5, requires_grad=True), True, True, bias)
    torch.library.opcheck(torch.ops.adatom.linear_bwd.default, given, test_utils=tests[:3])
    for needs in ((False, True, bias), (True, False, bias), (True, True, False)):
        torch.library.opcheck(torch.ops.adatom.linear_bwd.default, (*given[:-3], *needs), test_utils=tests)
    into = (*(None if t is None else t.detach() for t in call[:4]), *call[4:], kept, torch.randn(2, 3, 5))
    torch.library.opcheck(
        torch.ops.adatom.linear_bwd_into.default, (*into, True, bias, torch.zeros(5, 6)), test_utils=tests[:2]
    )


def test_a_profiler_sees_the_operator():
    x, w = tensors((4, 6), (5, 6), dtype=torch.float32)
    with torch.autograd.profiler.profile() as profile:
        adatom.linear(x, w)
    assert "adatom::linear_fwd" in {event.key for event in profile.key_averages()}


def test_autocast():
    x, w, b = tensors((4, 6), (5, 6), (5,), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = adatom.linear(x, w, b, activation="relu")
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert w.grad.dtype == torch.float32


def test_expanded_and_empty():
    x, w = tensors((4, 6), (5, 6))
    adatom.linear(x, w, activation="gelu").sum().backward()  # an expanded gradient
    torch.testing.assert_close(w.grad, torch.autograd.grad(F.gelu(x @ w.mT).sum(), w)[0])
    empty = adatom.linear(torch.zeros(0, 3, 6, dtype=F64, requires_grad=True), w, activation="silu")
    assert empty.shape == (0, 3, 5)
    assert torch.autograd.grad(empty.sum(), w)[0].eq(0).all()


BAD = {
    "no tensor": ({"x": [1.0]}, TypeError, r"tensors; got x=\[1.0\], weight=float32\[5, 4\] on cpu$"),
    "no weight": ({"weight": None}, TypeError, "tensors; got .*weight=None"),
    "features": ({"x": torch.zeros(3, 5)}, ValueError, r"x \(\.\.\., in\) and weight.*float32\[3, 5\]"),
    "scalar": ({"x": torch.zeros(())}, ValueError, r"x \(\.\.\., in\)"),
    "rank": ({"weight": torch.zeros(2, 5, 4)}, ValueError, r"weight=float32\[2, 5, 4\]"),
    "dtypes": ({"weight": torch.zeros(5, 4, dtype=F64)}, TypeError, "one dtype.*weight=float64"),
    "integers": (
        {"x": torch.zeros(3, 4, dtype=torch.int32), "weight": torch.zeros(5, 4, dtype=torch.int32)},
        TypeError,
        "one dtype",
    ),
    "sparse": ({"x": torch.zeros(3, 4).to_sparse()}, TypeError, "not sparse or nested"),
    "bias": ({"bias": torch.zeros(4)}, ValueError, r"bias \(out,\).*bias=float32\[4\]"),
    "device": ({"weight": torch.zeros(5, 4, device="meta")}, ValueError, "one device.*on meta"),
    "activation": ({"activation": "tanh"}, ValueError, "relu, gelu.*'tanh'"),
    "precision": ({"precision": "fp8"}, ValueError, "tf32x3.*'fp8'"),
    "weight_grad": ({"weight_grad": torch.zeros(5, 4, dtype=F64)}, ValueError, "contiguous float32 tensor like weight"),
    "backend": ({"backend": "cudnn"}, ValueError, "no backend 'cudnn' for linear_fwd"),
    "backend number": ({"backend": 1}, TypeError, "a backend by name, or None; got backend=1"),
    "backend list": ({"backend": [], "weight": torch.zeros(5, 4, requires_grad=True)}, TypeError, "a backend by name"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_answered(name):
    wrong, error, message = BAD[name]
    with pytest.raises(error, match=f"(?s){message}"):
        adatom.linear(**{"x": torch.zeros(3, 4), "weight": torch.zeros(5, 4), **wrong})


def posed(rows=4096, k=1024, n=4096, dtype=torch.bfloat16, machine=H100, **options):
    x, w = torch.empty(rows, k, dtype=dtype, device="meta"), torch.empty(n, k, dtype=dtype, device="meta")
    with pretend(machine):
        x, o, recompute, _ = inputs_of(x, w, **options)
        return problem(x, o, recompute)


def test_options_and_what_they_keep():
    assert [Options(a, False, "ieee").keeps for a in ACTIVATIONS] == ["", "out", "pre", "pre", "pre"]
    assert Options("relu", True, "ieee").keeps == "pre"


def test_choices_off_a_gpu():
    assert choose("linear_fwd", posed(machine=Device("cpu", 0, 0, 0))).backend == "torch"
    assert choose("linear_bwd", posed(dtype=F64)).backend == "torch"


def test_module():
    """adatom.nn.Linear takes the state of nn.Linear, and computes what it and the activation would."""
    plain = torch.nn.Linear(6, 5, dtype=F64)
    module = adatom.nn.Linear(6, 5, dtype=F64, activation="gelu")
    module.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 6, dtype=F64)
    torch.testing.assert_close(module(x), F.gelu(plain(x)))
    assert "activation=gelu" in repr(module)
    assert adatom.nn.Linear(6, 5, bias=False)(torch.randn(6)).shape == (5,)


@pytest.mark.parametrize(
    "wrong, message",
    [({"activation": "foo"}, "relu, gelu.*activation='foo'"), ({"precision": "fp8"}, "tf32x3.*precision='fp8'")],
)
def test_bad_modules_are_not_built(wrong, message):
    for module in (adatom.nn.Linear, adatom.nn.GatedMLP):
        with pytest.raises(ValueError, match=message):
            module(4, 5, **wrong)
    with pytest.raises(ValueError, match="relu, gelu.*activation=None"):
        adatom.nn.GatedMLP(4, 5, activation=None)


def test_transforms():
    """torch.func: grad, grad of grad, vmap of grad."""
    x, w = (t.detach() for t in tensors((4, 6), (5, 6)))

    def ours(x, w):
        return adatom.linear(x, w, activation="gelu").square().sum()

    def plain(x, w):
        return F.gelu(x @ w.mT).square().sum()

    def penalty(f):
        return torch.func.grad(lambda w: torch.func.grad(f)(x, w).square().sum())(w)

    torch.testing.assert_close(torch.func.grad(ours, argnums=1)(x, w), torch.func.grad(plain, argnums=1)(x, w))
    torch.testing.assert_close(penalty(ours), penalty(plain))
    each = (torch.func.vmap(torch.func.grad(f), in_dims=(0, None))(x, w) for f in (ours, plain))
    torch.testing.assert_close(*each)


def test_weight_grad_compiled():
    x, w = tensors((4, 6), (5, 6), dtype=torch.float32)
    buffers = torch.zeros(5, 6), torch.zeros(5, 6)

    def step(x, w, buffer):
        return adatom.linear(x, w, activation="silu", weight_grad=buffer)

    step(x, w, buffers[0]).sum().backward()
    torch.compile(step, fullgraph=True, backend="aot_eager")(x, w, buffers[1]).sum().backward()
    assert w.grad is None and buffers[0].abs().sum() > 0
    torch.testing.assert_close(*buffers)


# What callers do to a layer


def test_forward_mode_carries_tangents():
    x, w, b = torch.randn(4, 8, dtype=F64), torch.randn(6, 8, dtype=F64), torch.randn(6, dtype=F64)
    for ours, plain in (
        (lambda v: adatom.linear(v, w, b, activation="gelu"), lambda v: F.gelu(F.linear(v, w, b))),
        (lambda v: adatom.swiglu(v, w, w), lambda v: F.silu(F.linear(v, w)) * F.linear(v, w)),
    ):
        got, want = (torch.func.jvp(f, (x,), (torch.ones_like(x),)) for f in (ours, plain))
        torch.testing.assert_close(got, want)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(ours(dual)).tangent, want[1])
            with pytest.raises(NotImplementedError, match="no weight_grad in forward mode"):
                adatom.linear(dual, w, weight_grad=torch.zeros(6, 8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "relu"])
def test_forward_mode_in_16_bits_errs_as_pytorch_does(activation, dtype):
    """Activations are computed in float32, as in a plain call: also where their cubes are beyond float16."""
    z = torch.cat((torch.linspace(-4, 4, 801), torch.tensor([-300.0, 148.0, 300.0]))).to(dtype)[:, None]
    one, none = torch.ones(1, 1, dtype=dtype), torch.zeros(1, dtype=dtype)

    def layer(x):
        return adatom.linear(x, one.to(x.dtype), none.to(x.dtype), activation=activation)

    value, tangent = torch.func.jvp(layer, (z,), (torch.ones_like(z),))
    exact, slope = torch.func.jvp(layer, (z.double(),), (torch.ones_like(z).double(),))
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(value.double(), exact, rtol=eps, atol=eps / 16)
    torch.testing.assert_close(tangent.double(), slope, rtol=eps, atol=eps / 2)
    x, w, b = (torch.randn(n, 64).to(dtype) for n in (32, 48, 1))
    for tensors in ((x, w), (x, w, b[0, :48])):
        plain = adatom.linear(*tensors, activation=activation)
        carried, _ = torch.func.jvp(partial(adatom.linear, activation=activation), tensors, tensors)
        torch.testing.assert_close(carried, plain, rtol=0, atol=0)


def test_forward_mode_never_falls_back():
    x, w, n = torch.randn(4, 8), torch.randn(8, 8), torch.randn(8)
    for layer in (
        lambda v, b: adatom.linear(v, w, backend=b),
        lambda v, b: adatom.mlp(v, w, w, w, backend=b),
        lambda v, b: adatom.rms_norm(v, n, backend=b),
        lambda v, b: adatom.moe(v, v[:, :3], w[None].repeat(3, 2, 1), w[None].repeat(3, 1, 1), top_k=2, backend=b),
    ):
        for backend in (None, "torch", "deterministic"):
            torch.func.jvp(partial(layer, b=backend), (x,), (x,))
        for backend, error, says in (
            ("triton", NotImplementedError, 'backend "torch" in forward mode.*triton'),
            ("nonsense", ValueError, "no backend 'nonsense' for (linear|gated|norm|moe); there are: .*reference"),
        ):
            with pytest.raises(error, match=says):
                torch.func.jvp(partial(layer, b=backend), (x,), (x,))


def test_weight_grad_is_refused_where_it_would_get_nothing_or_spoil_the_weight():
    x, w, buffer = torch.randn(4, 8), torch.randn(6, 8, requires_grad=True), torch.zeros(2, 6, 8)

    def loss(x, w):
        return adatom.linear(x, w, weight_grad=buffer[0]).square().sum()

    for transform in (
        torch.func.grad(loss), torch.func.grad(loss, argnums=1), torch.func.vmap(loss, in_dims=(0, None)),
        torch.func.jacrev(loss),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match=r"no weight_grad under torch\.func"):
            transform(x, w)
    with pytest.raises(ValueError, match="a weight_grad in memory of its own"):
        adatom.linear(x, w, weight_grad=w.detach())
    whole = torch.zeros(9, 8)
    with pytest.raises(ValueError, match="a weight_grad in memory of its own"):
        adatom.linear(torch.ones(4, 8), torch.nn.Parameter(whole[:6]), weight_grad=whole[3:])
    with pytest.raises(ValueError, match="a weight_grad in memory of its own"):
        adatom.linear(whole[:6], torch.nn.Parameter(torch.ones(6, 8)), weight_grad=whole[:6])
    with pytest.raises(ValueError, match="not in that of x, weight or bias"):
        adatom.linear(x, w, torch.nn.Parameter(whole.flatten()[5:11]), weight_grad=whole[:6])
    y = adatom.linear(x.clone().requires_grad_(), w, weight_grad=whole[:6])
    with pytest.raises(NotImplementedError, match="no batch of gradients"):
        torch.autograd.grad(y, w, torch.ones(3, *y.shape), is_grads_batched=True, allow_unused=True)
    with torch.no_grad():
        weight = torch.nn.Parameter(buffer[1])  # parameters and buffers may share a storage, each its part of it
    adatom.linear(x, weight, weight_grad=buffer[0]).sum().backward()
    assert buffer[0].any() and not buffer[1].any()
    meta = (torch.empty(n, 8, device="meta") for n in (4, 6, 6))
    assert adatom.linear(*[next(meta), next(meta)], weight_grad=next(meta)).shape == (4, 6)


def test_the_gradient_of_a_computed_weight_is_not_dropped():
    a, x, buffer = torch.randn(6, 6, requires_grad=True), torch.randn(4, 6), torch.zeros(6, 6)
    with pytest.raises(ValueError, match="a weight that is a leaf"):
        adatom.linear(x, a @ a, weight_grad=buffer)
    with torch.autocast("cpu"):  # its cast of a leaf is none of these
        adatom.linear(x, a, weight_grad=buffer).sum().backward()
    assert buffer.any()


def test_results_may_be_changed_in_place():
    x = torch.randn(4, 8, requires_grad=True)
    torch.nn.Sequential(adatom.nn.Linear(8, 6), torch.nn.ReLU(inplace=True))(x).sum().backward()
    assert x.grad is not None
    adatom.nn.GatedMLP(8, 6)(x).add_(1.0).sum().backward()


def test_negated_views_and_batches_of_gradients_take_the_operator(monkeypatch):
    taken = []
    monkeypatch.setattr("adatom.ops.linear.op._fwd", lambda *args: taken.append(args))
    negated = torch.complex(torch.randn(4, 8), torch.randn(4, 8)).conj().imag
    w = torch.randn(6, 8)
    torch.testing.assert_close(adatom.linear(negated, w), negated @ w.T)
    assert negated.is_neg() and not taken
    monkeypatch.undo()
    x, vectorized = torch.randn(4, 8), torch.autograd.functional.jacobian
    jacobians = [vectorized(lambda v: adatom.linear(v, w, activation="silu"), x, vectorize=v) for v in (True, False)]
    torch.testing.assert_close(*jacobians)


def test_a_backward_inside_autocast():
    x, w, u = (torch.randn(n, 8, requires_grad=True) for n in (4, 6, 6))
    out = adatom.swiglu(x, w, u)
    with torch.autocast("cpu"):
        out.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32


def test_calls_without_gradients_are_remembered(monkeypatch):
    monkeypatch.setattr("adatom.ops.linear.api._plans", plans := {})
    x, weight, bias = torch.randn(2, 3, 8), torch.randn(6, 8), torch.randn(6)
    for _ in range(2):
        for n, options in enumerate(({}, {"activation": "gelu"}, {"precision": "ieee"}), 1):
            got = adatom.linear(x, weight, bias, **options)
            torch.testing.assert_close(got, adatom.linear(x, weight.clone().requires_grad_(), bias, **options).detach())
            assert got.shape == (2, 3, 6) and len(plans) >= n
        assert torch.equal(adatom.swiglu(x, weight), adatom.swiglu(x, weight[:3], weight[3:]))
        assert adatom.mlp(x[0, 0], weight[:3], weight[3:], weight[:, :3]).shape == (6,)
    found = len(plans)
    assert found == 7  # linear thrice, swiglu twice, both products of mlp
    adatom.linear(x, weight, torch.randn(12)[::2])  # which is copied
    adatom.linear(x, weight, weight_grad=torch.zeros(6, 8))
    assert len(plans) == found
    for wrong in ({"activation": "tanh"}, {"activation": ["gelu"]}, {"precision": "fp8"}, {"backend": "none"}):
        with pytest.raises(ValueError, match="adatom"):
            adatom.linear(x, weight, bias, **wrong)
    with pytest.raises(TypeError, match="tensors"):
        adatom.linear(x, weight, [1.0] * 6)


def test_the_second_derivative_of_gelu_tanh_errs_no_more_than_pytorch_s():
    """Where the sigmoid is near 1, too, and 1 less it is small."""
    z, one = torch.linspace(3, 6, 500)[:, None], torch.ones(1, 1)

    def second(f, z):
        z = z.clone().requires_grad_()
        (slope,) = torch.autograd.grad(f(z).sum(), z, create_graph=True)
        return torch.autograd.grad(slope.sum(), z)[0].double()

    def eager(z):
        return torch.nn.functional.gelu(z, approximate="tanh")

    true = second(eager, z.double())
    ours = second(lambda z: adatom.linear(z, one, activation="gelu_tanh"), z)
    assert (ours - true).abs().max() <= 2 * (second(eager, z) - true).abs().max()
