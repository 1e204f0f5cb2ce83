"""swiglu(), geglu() and mlp(): values and derivatives on the CPU, and bad input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import adatom
import adatom.nn
from adatom import verify
from adatom.ops.gated import cases
from adatom.registry import rows

F64 = torch.float64
GATES = {
    "silu": (adatom.swiglu, {}, F.silu),
    "gelu": (adatom.geglu, {}, F.gelu),
    "gelu_tanh": (adatom.geglu, {"approximate": "tanh"}, lambda z: F.gelu(z, approximate="tanh")),
}

pytestmark = pytest.mark.usefixtures("one_thread")


def tensors(*shapes, dtype=F64):
    return [torch.randn(s, dtype=dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_values_and_gradients_are_eager_pytorchs(gate, joined, recompute):
    function, options, act = GATES[gate]
    x, a, b = tensors((2, 3, 5), (7, 5), (7, 5))
    weights = (torch.cat((a, b)),) if joined else (a, b)
    out = function(x, *weights, recompute=recompute, **options)
    expected = act(x @ a.mT) * (x @ b.mT)
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(expected)
    for got, want in zip(torch.autograd.grad(out, (x, a, b), dout), torch.autograd.grad(expected, (x, a, b), dout)):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("shapes", [((3, 4), (10, 4)), ((3, 4), (5, 4), (5, 4))])
def test_first_and_second_derivatives(gate, shapes):
    function, options, _ = GATES[gate]
    given = tensors(*shapes)
    torch.autograd.gradcheck(lambda *t: function(*t, **options), given)
    torch.autograd.gradgradcheck(lambda *t: function(*t, **options), given)


def test_second_derivatives_of_some_inputs():
    x, a, b = tensors((3, 4), (5, 4), (5, 4))
    for wanted in ((0,), (1,), (2,), (0, 2)):
        given = [t if i in wanted else t.detach() for i, t in enumerate((x, a, b))]
        torch.autograd.gradgradcheck(adatom.swiglu, given)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "none"])
def test_mlp(activation):
    acts = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": GATES["gelu_tanh"][2], "relu": F.relu, "none": lambda z: z}
    x, gate, up, down = tensors((2, 3, 4), (6, 4), (6, 4), (5, 6))
    out = adatom.mlp(x, gate, up, down, activation=activation)
    expected = (acts[activation](x @ gate.mT) * (x @ up.mT)) @ down.mT
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(adatom.mlp(x, torch.cat((gate, up)), None, down, activation=activation), expected)
    given = (x, gate, up, down)
    for got, want in zip(torch.autograd.grad(out.sum(), given), torch.autograd.grad(expected.sum(), given)):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("case", cases.SMALL, ids=lambda case: case.name)
def test_cpu_rows_are_right(case):
    results = verify.examine_case(case, rows("gated_fwd") + rows("gated_bwd"), torch.device("cpu"))
    assert {r.backend for r in results} == {"torch", "reference"}
    assert all(r.ok for r in results), [r for r in results if not r.ok]


def test_what_is_kept_for_the_backward():
    """What gate and product were given, and nothing of what follows; with recompute, the inputs alone."""

    def elements(**options):
        saved = []
        x, w = tensors((6, 4), (10, 4))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            adatom.swiglu(x, w, **options)
        return sum(t.numel() for t in saved if t.shape[0] == 6 and t.shape != (6, 4))

    assert elements() == 60
    assert elements(recompute=True) == 0


@pytest.mark.parametrize("joined", [False, True])
def test_compiled(joined):
    x, a, b = tensors((4, 6), (8, 6), (8, 6), dtype=torch.float32)
    weights = (a,) if joined else (a, b)
    compiled = torch.compile(lambda *t: adatom.swiglu(*t) * 2, fullgraph=True, backend="aot_eager")
    got, want = compiled(x, *weights), adatom.swiglu(x, *weights) * 2
    torch.testing.assert_close(got, want)
    given = (x, *weights)
    for g, w in zip(torch.autograd.grad(got.sum(), given), torch.autograd.grad(want.sum(), given)):
        torch.testing.assert_close(g, w)


@pytest.mark.parametrize("joined", [False, True])
def test_opcheck(joined):
    x, a, b = tensors((2, 3, 6), (8, 6), (8, 6), dtype=torch.float32)
    call = (x, a, None if joined else b, None, "silu", True, "tf32x3", None)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.adatom.linear_fwd.default, (*call, True, None), test_utils=tests)
    n = 4 if joined else 8
    kept, dout = torch.randn(6, 2 * n), torch.randn(2, 3, n, requires_grad=True)
    torch.library.opcheck(torch.ops.adatom.linear_bwd.default, (*call, kept, dout, True, True, False), test_utils=tests)


BAD = {
    "odd": (lambda x, w: adatom.swiglu(x, w[:5]), ValueError, r"\(2 \* out, in\).*w_gate=float32\[5, 4\]"),
    "shapes": (lambda x, w: adatom.swiglu(x, w, w[:4]), ValueError, r"of one shape.*w_up=float32\[4, 4\]"),
    "approximate": (lambda x, w: adatom.geglu(x, w, approximate="erf"), ValueError, "none.*tanh.*'erf'"),
    "activation": (lambda x, w: adatom.mlp(x, w, w, w.mT, activation=None), ValueError, "an activation among"),
    "hidden": (lambda x, w: adatom.mlp(x, w, w, w), ValueError, r"w_down \(out, hidden\).*w_down=float32\[6, 4\]"),
    "features": (
        lambda x, w: adatom.swiglu(x[:, 1:], w),
        ValueError,
        r"x \(\.\.\., in\) and weights.*x=float32\[3, 3\]",
    ),
    "tensors": (lambda x, w: adatom.swiglu(x, w, 1.0), TypeError, "tensors; got.*w_up=1.0"),
    "backend": (lambda x, w: adatom.swiglu(x, w, backend="cudnn"), ValueError, "no backend 'cudnn' for gated_fwd"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_answered(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=f"(?s){message}"):
        call(torch.zeros(3, 4), torch.zeros(6, 4))


def test_module():
    module = adatom.nn.GatedMLP(4, 10, activation="gelu", dtype=F64)
    assert list(module.state_dict()) == ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]
    x = torch.randn(2, 3, 4, dtype=F64)
    expected = module.down_proj(F.gelu(module.gate_proj(x)) * module.up_proj(x))
    torch.testing.assert_close(module(x), expected)
    assert adatom.nn.GatedMLP(4, 10, 3)(x.float()).shape == (2, 3, 3)
    assert "activation=gelu" in repr(module)
