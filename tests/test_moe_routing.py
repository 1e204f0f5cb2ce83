"""moe_route() and load_balancing_loss() against plain loops, and what they refuse."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import adatom
from adatom.nn import MoE
from adatom.ops.route.api import expert_counts

F64 = torch.float64

pytestmark = pytest.mark.usefixtures("one_thread")


def plainly(logits, top_k, scoring="softmax", renormalize=True, selection_bias=None, groups=None, scale=1.0):
    """Token by token, in lists: {expert: weight} of each."""
    found = []
    for row in logits.double():
        scores = (row.softmax(0) if scoring == "softmax" else row.sigmoid()).tolist()
        choice = [s + (0.0 if selection_bias is None else float(selection_bias[e])) for e, s in enumerate(scores)]
        allowed = range(len(scores))
        if groups is not None:
            n, kept, best = (*groups, 2)[:3]
            size = len(scores) // n
            members = [range(g * size, (g + 1) * size) for g in range(n)]
            sums = [sum(sorted((choice[e] for e in some), reverse=True)[:best]) for some in members]
            allowed = [e for g in sorted(range(n), key=lambda g: -sums[g])[:kept] for e in members[g]]
        chosen = sorted(allowed, key=lambda e: -choice[e])[:top_k]
        total = sum(scores[e] for e in chosen) if renormalize else 1.0
        found.append({e: scale * scores[e] / total for e in chosen})
    return found


OPTIONS = {
    "softmax": {},
    "not renormalized": {"renormalize": False},
    "sigmoid": {"scoring": "sigmoid"},
    "sigmoid, not renormalized": {"scoring": "sigmoid", "renormalize": False},
    "scale": {"scale": 2.5},
    "bias": {"scoring": "sigmoid", "selection_bias": torch.linspace(1, -1, 12)},
    "bias of softmax": {"selection_bias": torch.linspace(1, -1, 12), "renormalize": False},
    "groups": {"groups": (4, 2)},
    "groups by their best": {"groups": (3, 1, 1)},
    "groups by three": {"groups": (3, 2, 3)},
    "groups of one": {"groups": (12, 5)},
    "DeepSeek-V3": {
        "scoring": "sigmoid",
        "selection_bias": torch.linspace(0.3, -0.3, 12),
        "groups": (4, 2),
        "scale": 2,
    },
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("top_k", [1, 3, 4])
def test_routes_are_a_loops(name, top_k):
    options, logits = OPTIONS[name], torch.randn(40, 12, dtype=F64)
    weights, indices = adatom.moe_route(logits, top_k, **options)
    assert weights.shape == indices.shape == (40, top_k) and indices.dtype == torch.int64
    for w, e, want in zip(weights, indices.tolist(), plainly(logits, top_k, **options)):
        assert set(e) == set(want) and len(set(e)) == top_k
        torch.testing.assert_close(w, torch.tensor([want[i] for i in e], dtype=F64))


@pytest.mark.parametrize("seed", range(8))
def test_random_routes(seed):
    torch.manual_seed(seed)
    groups, size = (int(n) for n in torch.randint(1, 5, (2,)))
    kept = int(torch.randint(1, groups + 1, ()))
    top_k = int(torch.randint(1, kept * size + 1, ()))
    options = {
        "scoring": ["softmax", "sigmoid"][seed % 2],
        "renormalize": seed % 3 > 0,
        "selection_bias": torch.randn(groups * size) if seed % 4 > 1 else None,
        "groups": (groups, kept) if seed % 5 else None,
    }
    logits = 3 * torch.randn(15, groups * size, dtype=F64)
    weights, indices = adatom.moe_route(logits, top_k, **options)
    for w, e, want in zip(weights.tolist(), indices.tolist(), plainly(logits, top_k, **options)):
        assert dict(zip(e, w)) == pytest.approx(want)


def test_all_experts():
    logits = torch.randn(5, 4, dtype=F64)
    weights, indices = adatom.moe_route(logits, 4)
    torch.testing.assert_close(weights.gather(1, indices.argsort(1)), logits.softmax(1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_are_float32(dtype):
    logits = torch.randn(2, 9, 6).to(dtype)
    weights, indices = adatom.moe_route(logits, 2)
    assert weights.dtype == torch.float32 and weights.shape == (2, 9, 2)
    torch.testing.assert_close(weights, torch.softmax(logits.float().gather(-1, indices), -1))


def test_scores_that_are_all_zero():
    """Sigmoids of far negative logits are 0 in float32: their weights are 0, and not 0 / 0."""
    logits = torch.full((3, 4), -1e4, requires_grad=True)
    weights, _ = adatom.moe_route(logits, 2, scoring="sigmoid")
    assert not weights.any()
    assert torch.autograd.grad(weights.sum(), logits)[0].isfinite().all()


@pytest.mark.parametrize("options", [{}, {"scoring": "sigmoid", "groups": (2, 1)}, {"renormalize": False}], ids=str)
def test_derivatives(options):
    logits = torch.randn(4, 6, dtype=F64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: adatom.moe_route(x, 2, **options)[0], logits)
    torch.autograd.gradgradcheck(lambda x: adatom.moe_route(x, 2, **options)[0], logits)


def test_the_bias_only_chooses():
    logits, bias = torch.randn(9, 4, requires_grad=True), torch.zeros(4, requires_grad=True)
    plain = adatom.moe_route(logits, 2, scoring="sigmoid", renormalize=False)
    with torch.no_grad():
        bias[3] = 10
    weights, indices = adatom.moe_route(logits, 2, scoring="sigmoid", renormalize=False, selection_bias=bias)
    assert (indices[:, 0] == 3).all() and not torch.equal(indices, plain[1])
    torch.testing.assert_close(weights[:, 0], logits[:, 3].sigmoid())
    assert torch.autograd.grad(weights.sum(), bias, allow_unused=True) == (None,)


@pytest.mark.parametrize("capacity", [0, 1, 3, 100])
def test_capacity(capacity):
    """The first pairs of each expert in the order of tokens stay; weights of the others are 0."""
    logits = torch.randn(3, 5, 4, dtype=F64) + torch.tensor([2.0, 0, 0, -2])
    weights, indices = adatom.moe_route(logits, 2)
    kept_weights, kept = adatom.moe_route(logits, 2, capacity=capacity)
    taken = [0] * 4
    for w, e, kw, ke in zip(*(t.reshape(-1).tolist() for t in (weights, indices, kept_weights, kept))):
        fits, taken[e] = taken[e] < capacity, taken[e] + 1
        assert (kw, ke) == ((w, e) if fits else (0.0, 4))
    assert expert_counts(kept, 4).tolist() == [min(n, capacity) for n in taken]


def test_counts():
    indices = torch.tensor([[0, 2], [2, 4], [-1, 2]])
    assert expert_counts(indices, 4).tolist() == [1, 0, 3, 0]
    assert expert_counts(indices[:0], 4).tolist() == [0] * 4


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("masked", [False, True])
def test_load_balancing_loss(scoring, masked):
    logits = torch.randn(3, 7, 6, dtype=F64, requires_grad=True)
    _, indices = adatom.moe_route(logits, 2, scoring=scoring)
    mask = torch.rand(3, 7) > 0.4 if masked else None
    loss = adatom.load_balancing_loss(logits, indices, scoring=scoring, mask=mask)
    count = mask if masked else torch.ones(3, 7, dtype=torch.bool)
    p = logits.softmax(-1) if scoring == "softmax" else F.normalize(logits.sigmoid(), p=1, dim=-1)
    share = F.one_hot(indices, 6).sum(-2)[count].double().mean(0)
    want = 6 * (share * p[count].mean(0)).sum()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], torch.autograd.grad(want, logits)[0])


def test_a_balanced_load_has_loss_top_k():
    indices = torch.tensor([[0, 1], [2, 3]])
    assert adatom.load_balancing_loss(torch.zeros(2, 4), indices).item() == pytest.approx(2)
    assert adatom.load_balancing_loss(torch.zeros(0, 4), indices[:0]).item() == 0
    nobody = torch.zeros(2, dtype=torch.bool)
    assert adatom.load_balancing_loss(torch.zeros(2, 4), indices, mask=nobody).item() == 0


def test_load_balancing_loss_is_transformers():
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    layers = tuple(torch.randn(6, 8) for _ in range(3))
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    logits = torch.cat(layers)
    indices = adatom.moe_route(logits, 2)[1]
    ours = adatom.load_balancing_loss(logits, indices)
    torch.testing.assert_close(ours, mixtral.load_balancing_loss_func(layers, 8, 2))
    ours = adatom.load_balancing_loss(logits, indices, mask=mask.reshape(-1).bool().repeat(3))
    torch.testing.assert_close(ours, mixtral.load_balancing_loss_func(layers, 8, 2, mask))


BAD = {
    "no tensor": ({"router_logits": [1.0]}, TypeError, "floating router_logits"),
    "integers": ({"router_logits": torch.zeros(3, 8, dtype=torch.int64)}, TypeError, "floating router_logits"),
    "no experts": ({"router_logits": torch.zeros(3, 0)}, ValueError, r"router_logits=float32\[3, 0\]"),
    "top_k 0": ({"top_k": 0}, ValueError, "top_k from 1"),
    "top_k": ({"top_k": 9}, ValueError, "top_k from 1 to the number of experts; got top_k=9"),
    "scoring": ({"scoring": "tanh"}, ValueError, "softmax, sigmoid; got scoring='tanh'"),
    "bias": ({"selection_bias": torch.zeros(7)}, ValueError, r"selection_bias \(experts,\)"),
    "groups": ({"groups": (3, 1)}, ValueError, "a divisor of experts"),
    "groups no tuple": ({"groups": 2}, ValueError, "a divisor of experts.*groups=2"),
    "groups fractions": ({"groups": (2.0, 1)}, ValueError, r"groups=\(2.0, 1\)"),
    "groups kept": ({"groups": (4, 5)}, ValueError, "kept from 1 to n"),
    "groups of what": ({"groups": (4,)}, ValueError, r"groups \(n, kept\)"),
    "too few": ({"groups": (4, 1), "top_k": 3}, ValueError, "no more experts for a token than its groups have"),
    "sparse": ({"router_logits": torch.zeros(3, 8).to_sparse()}, TypeError, "not sparse or nested"),
    "scale": ({"scale": None}, ValueError, r"as scale a finite number.*; got scale=None"),
    "scale that is infinite": ({"scale": math.inf}, ValueError, r"as scale a finite number.*; got scale=inf"),
    "scales": ({"scale": torch.ones(3)}, ValueError, r"as scale a finite number.*; got scale=float32\[3\]"),
    "capacity": ({"capacity": 1.5}, ValueError, "a capacity of 0 or more"),
    "capacity below 0": ({"capacity": -1}, ValueError, "a capacity of 0 or more pairs; got capacity=-1"),
    "capacity bool": ({"capacity": True}, ValueError, "capacity=True"),
    "top_k bool": ({"top_k": True}, ValueError, "got top_k=True"),
    "top_k None": ({"top_k": None}, ValueError, "got top_k=None"),
    "None": ({"router_logits": None}, TypeError, "got router_logits=None"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_answered(name):
    wrong, error, message = BAD[name]
    with pytest.raises(error, match=f"(?s){message}"):
        adatom.moe_route(**{"router_logits": torch.zeros(3, 8), "top_k": 2, **wrong})


def test_bad_input_of_the_loss_is_answered():
    with pytest.raises(ValueError, match=r"integer indices \(\.\.\., top_k\)"):
        adatom.load_balancing_loss(torch.zeros(3, 8), torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"integer indices"):
        adatom.load_balancing_loss(torch.zeros(3, 8), torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="a bool mask"):
        adatom.load_balancing_loss(torch.zeros(3, 8), torch.zeros(3, 2, dtype=torch.int64), mask=torch.ones(3))
    indices = torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="one device.*on cpu.*on meta"):
        adatom.load_balancing_loss(torch.zeros(3, 8), indices.to("meta"))
    with pytest.raises(ValueError, match="one device.*on cpu.*on meta"):
        adatom.load_balancing_loss(torch.zeros(3, 8), indices, mask=torch.ones(3, dtype=torch.bool, device="meta"))
    with pytest.raises(TypeError, match=r"int32 or int64; got indices=float32\[3, 2\]"):
        expert_counts(indices.float(), 8)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # PyTorch's own, on the first use
def test_forward_mode_carries_tangents():
    """Of values and of gradients, to x, the router and the experts; a dropped pair has none."""
    shapes = ((6, 8), (6, 3), (3, 10, 8), (3, 8, 5))
    given, tangents = (tuple(torch.randn(s, dtype=torch.float64) for s in shapes) for _ in range(2))
    route = {"top_k": 2, "capacity": 3}

    def ours(x, logits, up, down):
        return adatom.moe(x, logits, up, down, **route)

    def plain(x, logits, up, down):
        weights, indices = adatom.moe_route(logits, **route)
        shares = [torch.where(indices == e, weights, 0).sum(1, keepdim=True) for e in range(3)]
        return sum(s * adatom.swiglu(x, *u.chunk(2)) @ d.mT for s, u, d in zip(shares, up, down))

    assert (adatom.moe_route(given[1], **route)[1] == 3).any()
    for f in (lambda g: g, lambda g: torch.func.grad(lambda *a: g(*a).square().sum(), argnums=(0, 1, 2, 3))):
        got, want = (torch.func.jvp(f(g), given, tangents) for g in (ours, plain))
        torch.testing.assert_close(got, want)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(given[0], tangents[0])
        got = torch.autograd.forward_ad.unpack_dual(ours(dual, *given[1:])).tangent
    torch.testing.assert_close(got, torch.func.jvp(lambda x: plain(x, *given[1:]), given[:1], tangents[:1])[1])


@pytest.mark.filterwarnings("ignore:torch.searchsorted", "ignore:There is a performance drop")  # of vmap
@pytest.mark.parametrize("capacity", [None, 1])
def test_transforms(capacity):
    """vmap, and torch.func.grad twice, give what autograd gives."""
    torch.manual_seed(0)
    x, logits = torch.randn(3, 4, 8, dtype=F64), torch.randn(3, 4, 5, dtype=F64)
    up, down = torch.randn(5, 6, 8, dtype=F64), torch.randn(5, 8, 3, dtype=F64)

    def out(x, logits, up=up):
        return adatom.moe(x, logits, up, down, top_k=2, capacity=capacity)

    def loss(x, logits, up):
        return out(x, logits, up).square().sum()

    torch.testing.assert_close(torch.vmap(out)(x, logits), torch.stack([out(*one) for one in zip(x, logits)]))
    each = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)), in_dims=(0, 0, None))(x, logits, up)
    for i in range(3):
        given = [t.clone().requires_grad_() for t in (x[i], logits[i], up)]
        torch.testing.assert_close([g[i] for g in each], list(torch.autograd.grad(loss(*given), given)))

    def slope(up):
        return torch.func.grad(loss)(x[0], logits[0], up).sin().sum()

    given = [t.clone().requires_grad_() for t in (x[0], up)]
    (dx,) = torch.autograd.grad(loss(given[0], logits[0], given[1]), given[0], create_graph=True)
    torch.testing.assert_close(torch.func.grad(slope)(up), torch.autograd.grad(dx.sin().sum(), given[1])[0])


class _Calls(TorchDispatchMode):
    """Counts adatom's operators."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names += [op.name()] if op.namespace == "adatom" else []
        return op(*args, **(kwargs or {}))


def test_second_derivatives_of_frozen_experts_cost_no_sums_over_them():
    up, down = torch.randn(3, 10, 8), torch.randn(3, 8, 5)
    x, logits = torch.randn(6, 8, requires_grad=True), torch.randn(6, 3)
    for experts in (False, True):
        given = up.clone().requires_grad_(experts), down.clone().requires_grad_(experts)
        (dx,) = torch.autograd.grad(adatom.moe(x, logits, *given, top_k=2).sum(), x, create_graph=True)
        with _Calls() as calls:
            dx.square().sum().backward()
        assert calls.names.count("adatom::moe_outer") == (3 if experts else 0)


@pytest.mark.parametrize("options", [{}, {"renormalize": False}, {"scale": 2.5}, {"groups": (3, 2)}], ids=str)
def test_what_is_not_a_number_is_not_hidden(options):
    """A softmax with a logit of NaN or +inf, or with none but -inf, is NaN throughout; other tokens never see it."""
    logits = torch.randn(4, 6, requires_grad=True)
    with torch.no_grad():
        logits[0, 3], logits[1, 2], logits[2] = torch.nan, torch.inf, -torch.inf
    weights, indices = adatom.moe_route(logits, 2, **options)
    assert weights[:3].isnan().all() and ((indices >= 0) & (indices < 6)).all()
    torch.testing.assert_close(weights[3:], adatom.moe_route(logits[3:], 2, **options)[0])
    grad = torch.autograd.grad(weights.sum(), logits)[0]
    assert grad[:3].isnan().any(1).all() and grad[3].isfinite().all()


def test_a_compiled_route_hides_nothing_either():
    logits = torch.randn(3, 6)
    logits[0, 3], logits[1, 2] = torch.nan, torch.inf
    torch.compiler.reset()
    compiled = torch.compile(lambda x: adatom.moe_route(x, 2), fullgraph=True)
    (got, _), (want, _) = compiled(logits), adatom.moe_route(logits, 2)
    assert got[:2].isnan().all()
    torch.testing.assert_close(got[2], want[2])


def test_one_sigmoid_that_is_not_a_number():
    logits = torch.tensor([[0.0, torch.nan, 1.0], [0.0, torch.inf, 1.0]])
    weights, indices = adatom.moe_route(logits, 2, scoring="sigmoid")
    assert weights[0].isnan().all() and (indices[:, 0] == 1).all()
    torch.testing.assert_close(weights[1], F.normalize(torch.tensor([1.0, torch.sigmoid(logits[1, 2])]), p=1, dim=0))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_logits_of_minus_infinity_mask_experts(scoring):
    """As if those experts were not there; a weight of 0 where fewer than top_k are left."""
    logits = torch.randn(5, 6, dtype=F64)
    masked = logits.clone()
    masked[:, 2:5] = -torch.inf
    masked.requires_grad_()
    weights, indices = adatom.moe_route(masked, 2, scoring=scoring)
    left = torch.tensor([0, 1, 5])
    want, places = adatom.moe_route(logits[:, left], 2, scoring=scoring)
    torch.testing.assert_close(weights, want)
    assert torch.equal(indices, left[places])
    first = torch.autograd.grad(weights[:, 0].sum(), masked, create_graph=True)[0]
    assert first.isfinite().all() and torch.autograd.grad(first.square().sum(), masked)[0].isfinite().all()
    masked = torch.where(torch.arange(6) == 3, masked, -torch.inf)
    masked[:, 3] = 0.5
    assert adatom.moe_route(masked, 2, scoring=scoring)[0].tolist() == [[1.0, 0.0]] * 5


def test_a_scale_may_be_learned():
    logits, scale = torch.randn(3, 4), torch.tensor(1.0, dtype=F64, requires_grad=True)
    weights, _ = adatom.moe_route(logits, 2, scale=scale)
    assert weights.dtype == torch.float32 and torch.autograd.grad(weights.sum(), scale)[0].item() == pytest.approx(3)


def test_weights_of_tiny_scores_add_up_to_one():
    logits, bias = torch.tensor([[60.0, 0, 0, 0]]), torch.tensor([-10.0, 0, 0, 0])
    weights, _ = adatom.moe_route(logits, 2, selection_bias=bias)
    assert weights.tolist() == [[0.5, 0.5]]


def test_second_derivatives_of_no_tokens():
    x = torch.zeros(0, 8, requires_grad=True)
    (dx,) = torch.autograd.grad(MoE(8, 5, 3, 2)(x).sum(), x, create_graph=True)
    assert torch.autograd.grad(dx.sum(), x)[0].shape == (0, 8)


def test_the_routers_dtype_holds_under_autocast():
    layer = MoE(8, 5, 3, 2, router_dtype=torch.float32, device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(3, 8), return_routing=True)[1].dtype == torch.float32


def test_module_with_capacity():
    torch.manual_seed(0)
    m = MoE(6, 5, 4, 2, capacity=2, dtype=F64)
    x = torch.randn(9, 6, dtype=F64)
    out, logits, indices = m(x, return_routing=True)
    torch.testing.assert_close(out, adatom.moe(x, logits, m.gate_up, m.down, top_k=2, capacity=2))
    assert indices.max() < 4 and not torch.equal(out, adatom.moe(x, logits, m.gate_up, m.down, top_k=2))
    half = MoE(6, 5, 4, 2, router_dtype=torch.float32, dtype=torch.bfloat16)
    _, logits, _ = half(x.bfloat16(), return_routing=True)
    assert logits.dtype == torch.float32
    assert half.to("meta")(x.bfloat16().to("meta")).shape == x.shape


BAD_MODULES = {
    "capacity": ({"capacity": -1}, ValueError, "capacity of 0 or more pairs; got capacity=-1"),
    "capacity fraction": ({"capacity": 1.5}, ValueError, "capacity=1.5"),
    "top_k": ({"top_k": 5}, ValueError, "top_k from 1 to the number of experts; got top_k=5, experts=4"),
    "experts": ({"experts": 0}, ValueError, "experts of at least 1.*experts=0"),
    "hidden": ({"hidden": 2.0}, ValueError, "integers.*hidden=2.0"),
    "shared": ({"shared": -1}, ValueError, "shared of at least 0.*shared=-1"),
    "scoring": ({"scoring": "foo"}, ValueError, "softmax, sigmoid; got scoring='foo'"),
    "groups": ({"groups": (3, 1)}, ValueError, r"a divisor of experts.*groups=\(3, 1\), experts=4"),
    "scale": ({"scale": math.nan}, ValueError, "scale=nan"),
    "activation": ({"activation": "foo"}, ValueError, "relu, gelu.*activation='foo'"),
    "no activation": ({"activation": None}, ValueError, "relu, gelu.*activation=None"),
    "router_dtype": ({"router_dtype": torch.int32}, TypeError, "floating router_dtype; got router_dtype=torch.int32"),
}


@pytest.mark.parametrize("name", BAD_MODULES)
def test_bad_modules_are_not_built(name):
    wrong, error, message = BAD_MODULES[name]
    with pytest.raises(error, match=f"(?s){message}"):
        MoE(**{"dim": 8, "hidden": 4, "experts": 4, "top_k": 2, **wrong})


BAD_X = {
    "None": (None, TypeError, "a tensor x; got x=None"),
    "features": (torch.zeros(3, 7), ValueError, r"x \(\.\.\., dim\).*x=float32\[3, 7\] on cpu, router=float32\[4, 8\]"),
    "scalar": (torch.zeros(()), ValueError, r"x \(\.\.\., dim\)"),
    "device": (torch.zeros(3, 8, device="meta"), ValueError, "on the device of the router.*on meta"),
    "sparse": (torch.zeros(3, 8).to_sparse(), TypeError, "not sparse or nested"),
    "dtype": (torch.zeros(3, 8, dtype=torch.bfloat16), TypeError, "of the router's dtype; got x=bfloat16"),
    "integers": (torch.zeros(3, 8, dtype=torch.int64), TypeError, "a floating x"),
}


@pytest.mark.parametrize("name", BAD_X)
def test_bad_input_of_a_module_is_answered(name):
    x, error, message = BAD_X[name]
    with pytest.raises(error, match=f"(?s){message}"):
        MoE(8, 4, 4, 2)(x)


def test_dtypes_that_a_module_takes():
    """Under autocast those that it casts; with a router_dtype, those of the experts."""
    m, x = MoE(8, 4, 4, 2), torch.randn(3, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert m(x).dtype == m(x.half()).dtype == torch.bfloat16
        for wrong in (x.double(), x.long()):
            with pytest.raises(TypeError, match="of the router's dtype"):
                m(wrong)
    m = MoE(8, 4, 4, 2, router_dtype=F64)
    assert m(x).dtype == torch.float32
    with pytest.raises(TypeError, match="one dtype"):
        m(x.double())


@pytest.mark.parametrize("cast", ["bfloat16", "half", "double", "float"])
def test_the_selection_bias_stays_float32(cast):
    """Steps that balance the experts are lost in 16 bits."""
    m = MoE(8, 4, 4, 2, selection_bias=True)
    m.selection_bias += torch.tensor([1.0, 1 + 1e-4, -1, 0])
    bias = m.selection_bias.clone()
    x = torch.randn(3, 8)
    m = getattr(torch.nn.Sequential(m), cast)()[0]
    assert m.gate_up.dtype == getattr(torch, cast) and "selection_bias" in dict(m.named_buffers())
    assert m.selection_bias.dtype == torch.float32 and torch.equal(m.selection_bias, bias)
    assert m(x.to(m.gate_up.dtype)).shape == x.shape
    other = getattr(MoE(8, 4, 4, 2, selection_bias=True), cast)()
    other.load_state_dict(m.state_dict())
    assert other.selection_bias.dtype == torch.float32 and torch.equal(other.selection_bias, bias)
    low = {name: t.bfloat16() for name, t in m.state_dict().items()}
    other.load_state_dict(low, assign=True)
    assert other.selection_bias.dtype == torch.float32 and other.router.dtype == torch.bfloat16
    for device, dtype in (("meta", None), ("cpu", torch.bfloat16), ("meta", torch.bfloat16)):
        moved = copy.deepcopy(m).to(device=device, dtype=dtype)
        assert moved.selection_bias.device.type == device and moved.selection_bias.dtype == torch.float32
        assert moved.to_empty(device="cpu").selection_bias.is_cpu
    assert getattr(MoE(8, 4, 4, 2), cast)().selection_bias is None


def test_a_compiled_module_drops_the_same_pairs():
    """With the compiler's own code, not only its tracing."""
    m = MoE(6, 5, 4, 2, capacity=2, dtype=F64)
    torch.compiler.reset()
    compiled = torch.compile(m, fullgraph=True)
    for _ in range(3):
        x = torch.randn(9, 6, dtype=F64)
        torch.testing.assert_close(compiled(x), m(x))


def test_numbers_of_numpy_serve():
    m = MoE(np.int64(8), 4, 4, np.int64(2))
    assert m(torch.randn(3, 8)).shape == (3, 8)
    with pytest.raises(ValueError, match="a number of experts; got experts=2.5"):
        adatom.expert_counts(torch.tensor([0, 1]), 2.5)
    with pytest.raises(ValueError, match="which is no parameter here"):
        MoE(8, 4, 4, 2, scale=torch.ones(()))


def test_a_score_of_minus_infinity_does_not_let_other_groups_in():
    """Of the kept group, one expert is barred by its bias; those of other groups are not taken in its place."""
    barred = torch.zeros(8)
    barred[5] = -torch.inf
    logits = torch.tensor([[0.0, -1, -2, -3, 3, 2, -1, -2]])
    weights, indices = adatom.moe_route(logits, 2, scoring="sigmoid", groups=(4, 1, 1), selection_bias=barred)
    assert indices.tolist() == [[4, 5]]
    torch.testing.assert_close(weights.sum(-1), torch.ones(1))
    one = torch.full((8,), -torch.inf)
    one[2] = 0  # of all experts the only one that may be chosen, beside one of its group
    assert adatom.moe_route(torch.zeros(1, 8), 2, scoring="sigmoid", groups=(4, 2), selection_bias=one)[1][0, 0] == 2


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("junk", [torch.nan, -torch.inf])
def test_tokens_that_do_not_count_give_no_gradient(scoring, junk):
    logits, indices = torch.randn(5, 3), torch.randint(3, (5, 2))
    logits[3] = junk
    logits.requires_grad_()
    mask = torch.tensor([True, True, False, False, True])
    loss = adatom.load_balancing_loss(logits, indices, scoring=scoring, mask=mask)
    loss.backward()
    assert not logits.grad[~mask].any() and logits.grad[mask].isfinite().all() and logits.grad[mask].any()
    alone = adatom.load_balancing_loss(logits.detach()[mask], indices[mask], scoring=scoring)
    torch.testing.assert_close(loss.detach(), alone)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # PyTorch's own, both
@pytest.mark.filterwarnings("ignore:torch.searchsorted")
def test_linearize_and_many_tangents() -> None:
    """As jvp, and as a loop over samples."""
    torch.manual_seed(0)
    module, x, t = adatom.nn.MoE(8, 4, 4, 2, dtype=torch.float64), *torch.randn(2, 5, 8, dtype=torch.float64)
    expected = torch.func.jvp(module, (x,), (t,))[1]
    torch.testing.assert_close(torch.func.linearize(module, x)[1](t), expected)
    each = torch.func.vmap(lambda x, t: torch.func.jvp(lambda x: module(x[None])[0], (x,), (t,))[1])(x, t)
    torch.testing.assert_close(each, expected)
