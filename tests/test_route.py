"""Routing's kernels in Triton's interpreter, the short way of repeated calls, and what `verify` lets pass."""

from __future__ import annotations

import pytest
import torch

import adatom
from adatom import signature, verify
from adatom.compile import DEVICES
from adatom.device import pretend
from adatom.ops.moe import api as moe_api
from adatom.ops.route import api, cases, reference, torch_route, trial
from adatom.ops.route.op import flat, route_fwd
from adatom.ops.route.problem import Options
from adatom.registry import Row, choose, rows
from adatom.tiles.launch import observed

SMALL = """
import sys, torch
from adatom import verify
from adatom.ops.route import cases
from adatom.registry import rows
mine = [row for row in rows("route_fwd") + rows("route_bwd") if row.backend == "triton"]
part = int(sys.argv[1])
for case in cases.SMALL[part::2]:
    results = verify.examine_case(case, mine, torch.device("cpu"))
    assert all(r.ok for r in results), results
    assert len(results) == 2 * (case.tokens > 0 and case.dtype != torch.float64), results
"""

NUMBERS = """
import warnings
import torch
from adatom.ops.route import reference, triton_route
from adatom.ops.route.problem import Options
warnings.simplefilter("ignore", RuntimeWarning)  # of infinities, which the interpreter leaves to numpy
torch.manual_seed(0)
logits = torch.randn(8, 8)
logits[0, 6], logits[1, 7], logits[2], logits[3, :6] = torch.nan, torch.inf, -torch.inf, -torch.inf
logits[4] = torch.tensor([-0.0, 0.0, 1, 1, -1, 1, 0, 0])  # -0 is 0, and of equals the first comes first
logits[5, 1::2] = -torch.nan
for scoring, renormalize, biased, groups in (
    ("softmax", True, False, (0, 0, 0)), ("softmax", False, False, (0, 0, 0)), ("sigmoid", True, False, (0, 0, 0)),
    ("sigmoid", False, True, (0, 0, 0)), ("softmax", True, True, (0, 0, 0)), ("softmax", True, False, (4, 2, 2)),
    ("sigmoid", True, True, (4, 3, 2)), ("sigmoid", True, False, (4, 4, 8)), ("sigmoid", True, True, (2, 1, 1)),
):
    o = Options(4, scoring, renormalize, groups, 1.5, biased)
    bias = torch.linspace(1, -1, 8) if biased else None
    if biased:
        bias[2:6] = -torch.inf
    got, want = triton_route.forward(logits, bias, o), reference.forward(logits, bias, o)
    nan = want[0].isnan().any(1)
    exact = ~nan if scoring == "softmax" else torch.ones(8, dtype=torch.bool)
    assert torch.equal(got[1][exact], want[1][exact]), (o, got[1], want[1])
    assert ((got[1] >= 0) & (got[1] < 8)).all() and all(len(set(row)) == 4 for row in got[1].tolist()), got[1]
    torch.testing.assert_close(got[0], want[0], equal_nan=True)
    cotangent = torch.randn(4, 8).T
    got = triton_route.backward(logits, want[1], cotangent, o)[0]
    torch.testing.assert_close(got, reference.backward(logits, want[1], cotangent, o)[0], equal_nan=True)
"""


@pytest.mark.parametrize("part", ["0", "1"])
def test_the_kernels(interpreted, part):
    interpreted(SMALL, part)


def test_the_kernels_on_what_is_no_number_and_on_equals(interpreted):
    interpreted(NUMBERS)


@pytest.mark.parametrize("options", [{}, {"scoring": "sigmoid"}, {"renormalize": False}], ids=str)
def test_of_equals_the_lower_index(options):
    logits = torch.tensor([[1.0, 3, 2, 3, 2, 3]])
    assert adatom.moe_route(logits, 5, **options)[1].tolist() == [[1, 3, 5, 2, 4]]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [(0, 0, 0), (5, 2, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_search_by_keys_finds_what_a_stable_sort_does(dtype, groups, scoring):
    logits = torch.randn(300, 20).mul(2).round().div(2).to(dtype)  # with ties, and with -0
    logits[::7, 2], logits[::11, 4], logits[::5, 1:7] = torch.nan, torch.inf, -torch.inf
    o = Options(7, scoring, True, groups, 1.0, False)
    for got, want in zip(torch_route.forward(logits, None, o), reference.forward(logits, None, o)):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_strides_of_the_bias_do_not_matter():
    logits, wide = torch.randn(9, 8), torch.randn(8, 3)
    for bias in (wide[:, 1], torch.randn(16)[::2], torch.ones(1).expand(8)):
        got = adatom.moe_route(logits, 3, scoring="sigmoid", selection_bias=bias)
        want = adatom.moe_route(logits, 3, scoring="sigmoid", selection_bias=bias.clone())
        assert torch.equal(got[1], want[1])


def test_subclasses_are_routed_by_pytorchs_operators():
    class Named(torch.Tensor):
        pass

    logits = torch.randn(3, 6)
    weights, indices = adatom.moe_route(logits.as_subclass(Named), 2)
    assert type(weights) is Named and torch.equal(indices.as_subclass(torch.Tensor), adatom.moe_route(logits, 2)[1])


def test_scores_that_round_to_equals_do_not_choose():
    """Sigmoids of 20 and of 30 are both 1 in float32."""
    assert adatom.moe_route(torch.tensor([[0.0, 20, 30]]), 2, scoring="sigmoid")[1].tolist() == [[2, 1]]
    assert adatom.moe_route(torch.tensor([[0.0, -200, -150]]), 2)[1].tolist() == [[0, 2]]


def small(name: str) -> trial.Trial:
    return trial.Trial(next(c for c in cases.SMALL if c.name == name), torch.device("cpu"))


@pytest.mark.parametrize("name", ["bf16 ties", "f32 bias", "f32 V3"])
def test_verify_refuses_wrong_experts(name):
    def judged(change):
        def forward(logits, bias, o):
            weights, indices = reference.forward(logits, bias, o)
            return change(weights, indices.clone())

        return verify.examine(Row("route_fwd", "mine", forward, lambda p: None), small(name))

    def another(weights, indices):
        indices[3, -1] = (set(range(8)) - set(indices[3].tolist()) or {0}).pop()
        return weights, indices

    def swapped(weights, indices):
        return weights.flip(-1), indices.flip(-1)

    def twice(weights, indices):
        indices[3, 1] = indices[3, 0]
        return weights, indices

    def outside(weights, indices):
        indices[3, 1] = 1000
        return weights, indices

    assert judged(lambda weights, indices: (weights, indices)).ok
    assert not judged(lambda weights, indices: (weights * (1 + 1e-4), indices)).ok
    for change in (another, swapped, twice, outside):
        assert not judged(change).ok


def test_verify_lets_almost_equal_scores_be_taken_either_way():
    one = small("f32 bias")
    with torch.no_grad():
        one.bias.zero_()
        one.logits[:, 1] = one.logits[:, 0]
        one.logits[:, :2] += 5  # the first two are chosen first, and their order is a matter of rounding

    def forward(logits, bias, o):
        weights, indices = reference.forward(logits, bias, o)
        return weights[:, [1, 0, 2]], indices[:, [1, 0, 2]]

    assert verify.examine(Row("route_fwd", "mine", forward, lambda p: None), one).ok


def test_operators_keep_their_contracts():
    options = flat(Options(2, "softmax", True, (0, 0, 0), 1.0, False))
    for logits in (torch.randn(5, 6), torch.randn(5, 6, requires_grad=True), torch.randn(6, 5).T):
        torch.library.opcheck(torch.ops.adatom.route_fwd.default, (logits, None, *options, None))
        given = logits.detach(), torch.randint(6, (5, 2)), torch.randn(5, 2), *options, None
        torch.library.opcheck(torch.ops.adatom.route_bwd.default, given)


@pytest.mark.parametrize("options", [{}, {"scoring": "sigmoid", "renormalize": False}, {"renormalize": False}], ids=str)
def test_the_operators_gradient_is_autograds(options):
    """Of a backward alone, and of one that is differentiated."""
    logits, cotangent = torch.randn(4, 6, requires_grad=True), torch.randn(4, 2)
    o = Options(2, options.get("scoring", "softmax"), options.get("renormalize", True), (0, 0, 0), 0.5, False)
    weights, indices = route_fwd(logits, None, *flat(o), None)
    got = torch.autograd.grad(weights, logits, cotangent, create_graph=True)[0]
    plain = torch.autograd.grad(weights, logits, cotangent)[0]
    want = torch.autograd.grad(reference.weights_of(logits, indices, o), logits, cotangent, create_graph=True)[0]
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(plain, want)
    second = [torch.autograd.grad(g.square().sum(), logits)[0] for g in (got, want)]
    torch.testing.assert_close(*second)


def test_transforms():
    logits = torch.randn(3, 4, 6, dtype=torch.float64)

    def f(x):
        return adatom.moe_route(x, 2)[0].square().sum()

    batched = torch.vmap(lambda x: adatom.moe_route(x, 2))(logits)
    for got, want in zip(batched, adatom.moe_route(logits, 2)):
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        torch.func.jacfwd(torch.func.grad(f))(logits[0]), torch.func.hessian(f)(logits[0])
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match="torch.func"):
        torch.func.grad(lambda x: adatom.moe_route(x, 2, backend="triton")[0].sum())(logits[0])


@pytest.fixture
def forgotten(monkeypatch):
    """Nothing is remembered yet."""
    monkeypatch.setattr(api, "_plans", {})
    monkeypatch.setattr(moe_api, "_plans", {})


def test_calls_without_gradients_are_remembered(forgotten):
    x, up, down = torch.randn(3, 5, 8), torch.randn(4, 12, 8), torch.randn(4, 8, 6)
    for seed in range(3):
        logits = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(seed))
        out = adatom.moe(x, logits, up, down, top_k=2)
        wants = logits.clone().requires_grad_()
        torch.testing.assert_close(out, adatom.moe(x, wants, up, down, top_k=2).detach())
        assert len(api._plans) == len(moe_api._plans) == 1
    adatom.moe(x[..., 0, :], logits[..., 0, :], up, down, top_k=2)
    adatom.moe(x, logits, up, down, top_k=2, scoring="sigmoid")
    assert len(api._plans) == 3 and len(moe_api._plans) == 2
    adatom.moe(x, logits, up, down, top_k=2, activation="gelu")
    assert len(api._plans) == 3 and len(moe_api._plans) == 3
    bias = torch.zeros(4)
    for _ in range(2):
        got = adatom.moe_route(logits, 2, selection_bias=bias, groups=[2, 1])
        want = adatom.moe_route(logits.clone().requires_grad_(), 2, selection_bias=bias, groups=(2, 1))
        assert torch.equal(got[1], want[1]) and got[0].shape == (3, 5, 2)
    assert len(api._plans) == 4
    adatom.moe_route(logits, 2, selection_bias=bias.half())  # which is cast
    adatom.moe_route(logits, 2, capacity=1)
    adatom.moe_route(logits, 2, scale=torch.ones(()))
    assert len(api._plans) == 4


def test_a_remembered_call_still_refuses_what_is_wrong(forgotten):
    logits = torch.randn(3, 4)
    adatom.moe_route(logits, 1)
    adatom.moe_route(logits, 1, groups=(2, 1))
    bad = {"top_k": True}, {"top_k": [1]}, {"top_k": 1, "groups": [[1], 2]}, {"top_k": 1, "scoring": "none"}
    for wrong in (*bad, {"top_k": 1, "groups": (2.0, 1)}, {"top_k": 1, "groups": (2, True)}):
        with pytest.raises(ValueError, match="expected"):
            adatom.moe_route(logits, **wrong)
    with pytest.raises(TypeError, match="router_logits"):
        adatom.moe_route([1.0, 2.0], 1)
    with pytest.raises(TypeError, match="a backend by name"):
        adatom.moe_route(logits, 1, backend=5)
    adatom.moe_route(logits, 2, renormalize=(flag := torch.tensor(True)))
    assert torch.equal(
        adatom.moe_route(logits, 2, renormalize=flag.fill_(False))[0], adatom.moe_route(logits, 2, renormalize=False)[0]
    )
    x, up, down = torch.randn(3, 8), torch.randn(4, 12, 8), torch.randn(4, 8, 6)
    weights, indices = adatom.moe_route(logits, 1)
    adatom.moe_routed(x, weights, indices, up, down)
    with pytest.raises(ValueError, match="activation"):
        adatom.moe_routed(x, weights, indices, up, down, activation="tanh")
    with pytest.raises(TypeError, match="tensors"):
        adatom.moe_routed(x, weights, indices, up, None)


def test_what_equals_an_option_of_a_plan_is_refused_all_the_same(forgotten):
    logits = torch.randn(4, 8)
    for good, bad in ((2.0, 2 + 0j), (1, 1 + 0j)):
        adatom.moe_route(logits, 2, scale=good)
        with pytest.raises((TypeError, ValueError), match="scale"):
            adatom.moe_route(logits, 2, scale=bad)


def test_plans_do_not_fill_the_memory(forgotten):
    for n in range(4100):
        signature.remember(api._plans, n, None)
    assert len(api._plans) <= 4096


def test_which_kernel_runs():
    def chosen(arch: int, **changed):
        with pretend(DEVICES[arch]):
            case = next(c for c in cases.SMALL if c.name == "bf16")._replace(**changed)
            return choose("route_fwd", trial.Trial(case, torch.device("cpu")).problem).backend

    assert chosen(90) == chosen(80) == chosen(120) == "triton"
    assert chosen(90, experts=1024, top_k=32, groups=(8, 4)) == "triton"
    refused = ({"experts": 1025}, {"experts": 64, "top_k": 33}, {"dtype": torch.float64}, {"lead": (0,)})
    groups = ({"experts": 24, "groups": (4, 2)}, {"experts": 24, "groups": (3, 2)}, {"groups": (2, 1, 9)})
    for changed in (*refused, *groups):
        assert chosen(90, **changed) == "torch"
    assert "route_fwd" in str(adatom.explain("moe_route", torch.randn(2, 4), 2))
    assert [row.backend for row in rows("route_bwd")] == ["triton", "torch", "reference"]
    with pytest.raises(NotImplementedError, match="CUDA device"):
        adatom.moe_route(torch.randn(2, 4), 2, backend="triton")


@pytest.mark.parametrize(
    ("tokens", "experts", "rows_each"), [(1, 128, 1), (2112, 128, 2), (65536, 8, 32), (65536, 1024, 1)]
)
def test_a_program_takes_more_tokens_where_there_are_many(tokens, experts, rows_each):
    pytest.importorskip("triton")
    from adatom.ops.route import triton_route

    rows_of = []
    case = cases.SMALL[3]._replace(lead=(tokens,), experts=experts)
    with pretend(DEVICES[90]), observed(lambda kernel, args, meta, spill: rows_of.append(meta["ROWS"])):
        arguments = trial.blank(case)[1]
        triton_route.forward(*arguments["route_fwd"])
        triton_route.backward(*arguments["route_bwd"])
    assert rows_of == [rows_each] * 2
