"""moe() and moe_routed(): values and derivatives of every order on the CPU, what callers may rely on, and bad input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import adatom
from adatom import verify
from adatom.bench import rivals, rivals_moe
from adatom.device import Device, pretend
from adatom.nn import MoE
from adatom.ops.moe import cases, reference, torch_moe
from adatom.ops.moe.api import inputs_of
from adatom.ops.moe.problem import Inputs, Options, inverse_of, plan, problem
from adatom.ops.moe.torch_grouped import grouped, outer, way
from adatom.ops.moe.trial import Trial
from adatom.registry import Row, choose, rows

F64 = torch.float64
EAGER = {
    "none": lambda z: z,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}
H100 = Device("cuda", 90, 132, 232448)

pytestmark = pytest.mark.usefixtures("one_thread")


def tensors(tokens=7, hidden=5, wide=3, experts=4, top_k=2, dtype=F64):
    """x, weights, indices, w_gate_up, w_down; all but indices require grad."""
    shapes = ((tokens, hidden), (experts, 2 * wide, hidden), (experts, hidden, wide))
    x, gate_up, down = (torch.randn(s, dtype=dtype).requires_grad_() for s in shapes)
    weights = torch.rand(tokens, top_k, dtype=dtype).requires_grad_()
    return x, weights, torch.rand(tokens, experts).topk(top_k).indices, gate_up, down


def plainly(x, weights, indices, gate_up, down, activation="silu"):
    """A loop over tokens and their experts."""
    out = []
    for t in range(x.shape[0]):
        total = x[t] * 0
        for w, e in zip(weights[t], indices[t].tolist()):
            if 0 <= e < down.shape[0]:
                gate, up = (gate_up[e] @ x[t]).chunk(2)
                total = total + w * (down[e] @ (EAGER[activation](gate) * up))
        out.append(total)
    return torch.stack(out)


def check_against_the_loop(given, activation="silu", **options):
    indices = given[2]
    wanted = [t for t in given if t is not indices]
    out, expected = adatom.moe_routed(*given, activation=activation, **options), plainly(*given, activation)
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(expected)
    ours = torch.autograd.grad(out, wanted, dout)
    theirs = torch.autograd.grad(expected, wanted, dout, allow_unused=True, materialize_grads=True)
    for got, want in zip(ours, theirs):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", EAGER)
def test_values_and_gradients_are_a_loops(activation, recompute, backend):
    check_against_the_loop(tensors(), activation, recompute=recompute, backend=backend)


@pytest.mark.parametrize("seed", range(12))
def test_random_routing(seed):
    """Any numbers of tokens, experts and top_k; experts without tokens, named twice by one, and pairs dropped."""
    torch.manual_seed(seed)
    tokens, experts, top_k = (int(n) for n in torch.randint(1, 9, (3,)))
    x, weights, _, gate_up, down = tensors(tokens, 3, 4, experts, top_k=1)
    weights = torch.rand(tokens, top_k, dtype=F64).requires_grad_()
    indices = torch.randint(-2, experts + 2, (tokens, top_k))
    check_against_the_loop((x, weights, indices.to([torch.int32, torch.int64][seed % 2]), gate_up, down))


@pytest.mark.parametrize("chosen", [0, 3, -1, 4])
def test_all_tokens_to_one_expert_or_none(chosen):
    x, weights, indices, gate_up, down = tensors()
    check_against_the_loop((x, weights, torch.full_like(indices, chosen), gate_up, down))


def test_every_expert_for_every_token():
    check_against_the_loop(tensors(experts=3, top_k=3))


def test_empty():
    x, weights, indices, gate_up, down = tensors(tokens=0)
    out = adatom.moe_routed(x, weights, indices, gate_up, down)
    assert out.shape == (0, 5)
    assert all(not g.any() for g in torch.autograd.grad(out.sum(), (x, weights, gate_up, down)))
    for shape in ((4, 0, 3), (4, 5, 0), (0, 5, 3)):
        experts, hidden, wide = shape
        given = torch.randn(6, hidden), torch.rand(6, 2), torch.zeros(6, 2, dtype=torch.int64)
        out = adatom.moe_routed(*given, torch.randn(experts, 2 * wide, hidden), torch.randn(shape))
        assert out.shape == (6, hidden) and not out.any()
    x, weights, indices, gate_up, down = tensors(top_k=1)
    assert not adatom.moe_routed(x, weights[:, :0], indices[:, :0], gate_up, down).any()


@pytest.mark.parametrize("recompute", [False, True])
def test_dropped_pairs_touch_nothing(recompute):
    """Not even where weights of dropped pairs, or values of a token that has no others, are not numbers."""
    x, weights, indices, gate_up, down = tensors()
    indices[2] = -1
    indices[4, 1] = 4
    wanted = (x, weights, gate_up, down)
    with torch.no_grad():
        x[2] = weights[2] = weights[4, 1] = torch.nan
    for backend in ("torch", "reference"):
        out = adatom.moe_routed(x, weights, indices, gate_up, down, backend=backend, recompute=recompute)
        assert out.isfinite().all() and not out[2].any()
        grads = torch.autograd.grad(out.square().sum(), wanted, create_graph=True)
        assert all(g.isfinite().all() for g in grads) and not grads[0][2].any() and not grads[1][2].any()
        second = torch.autograd.grad(sum(g.square().sum() for g in grads), wanted)
        assert all(g.isfinite().all() for g in second)


@pytest.mark.parametrize("activation", [a for a in EAGER if a != "relu"])
@pytest.mark.parametrize("recompute", [False, True])
def test_first_and_second_derivatives(activation, recompute):
    x, weights, indices, gate_up, down = tensors(4, 3, 2, 3)
    indices[1, 0] = 3

    def f(x, weights, gate_up, down):
        options = {"activation": activation, "recompute": recompute}
        return adatom.moe_routed(x, weights, indices, gate_up, down, **options)

    torch.autograd.gradcheck(f, (x, weights, gate_up, down))
    torch.autograd.gradgradcheck(f, (x, weights, gate_up, down))


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 3)])
def test_derivatives_of_some_inputs(wanted):
    x, weights, indices, gate_up, down = tensors(4, 3, 2, 3)
    given = [t if i in wanted else t.detach() for i, t in enumerate((x, weights, gate_up, down))]

    def f(x, weights, gate_up, down):
        return adatom.moe_routed(x, weights, indices, gate_up, down)

    torch.autograd.gradcheck(f, given)
    torch.autograd.gradgradcheck(f, given)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"renormalize": False},
        {"scoring": "sigmoid", "scale": 2.5},
        {"scoring": "sigmoid", "groups": (2, 1), "selection_bias": torch.linspace(-1, 1, 4, dtype=F64)},
        {"capacity": 2},
    ],
    ids=str,
)
def test_derivatives_through_the_router(options):
    x, _, _, gate_up, down = tensors(5, 3, 2, 4)
    logits = torch.randn(5, 4, dtype=F64, requires_grad=True)

    def f(x, logits, gate_up, down):
        return adatom.moe(x, logits, gate_up, down, top_k=2, **options)

    torch.autograd.gradcheck(f, (x, logits, gate_up, down))
    torch.autograd.gradgradcheck(f, (x, logits, gate_up, down))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_second_derivatives_in_lower_precision(dtype):
    """Of every cotangent, with respect to everything; weights stay float32."""
    given = [t.detach() for t in tensors(30, 16, 8, 6, 2, dtype=torch.float32)]
    dout, given[2] = torch.randn(30, 16), given[2].clone()
    given[2][3, 1] = -1
    cotangents = [torch.randn(given[i].shape) for i in (0, 1, 3, 4)]

    def second(dtype, weights_dtype):
        kinds = (dtype, weights_dtype, None, dtype, dtype)
        leaves = [t if k is None else t.to(k).requires_grad_() for t, k in zip(given, kinds)]
        wanted = [leaves[i] for i in (0, 1, 3, 4)]
        cot = dout.to(dtype).requires_grad_()
        first = torch.autograd.grad(adatom.moe_routed(*leaves), wanted, cot, create_graph=True)
        total = [c.to(g.dtype) for c, g in zip(cotangents, first)]
        return torch.autograd.grad(first, (*wanted, cot), total)

    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5
    for got, want, like in zip(second(dtype, torch.float32), second(F64, F64), (0, 1, 3, 4, 0)):
        assert got.dtype == (torch.float32 if like == 1 else dtype)
        assert (got.double() - want).norm() <= tolerance * want.norm()


def test_third_derivative():
    x, weights, indices, gate_up, down = tensors(3, 3, 2, 3)

    def f(function):
        out = function(x, weights, indices, gate_up, down)
        first = torch.autograd.grad(out.square().sum(), x, create_graph=True)[0]
        second = torch.autograd.grad(first.square().sum(), gate_up, create_graph=True)[0]
        wanted = (x, weights, gate_up, down)
        return torch.autograd.grad(second.square().sum(), wanted, allow_unused=True, materialize_grads=True)

    for got, want in zip(f(adatom.moe_routed), f(plainly)):
        torch.testing.assert_close(got, want)


def test_leading_dimensions_and_strides():
    x, weights, indices, gate_up, down = tensors(6)
    expected = adatom.moe_routed(x, weights, indices, gate_up, down)
    shaped = (x.view(2, 3, 5), weights.view(2, 3, 2), indices.view(2, 3, 2))
    torch.testing.assert_close(adatom.moe_routed(*shaped, gate_up, down), expected.view(2, 3, 5))
    one = adatom.moe_routed(x[0], weights[0], indices[0], gate_up, down)
    torch.testing.assert_close(one, expected[0])
    apart = [t.detach().mT.contiguous().mT for t in (x, weights, gate_up, down)]
    torch.testing.assert_close(adatom.moe_routed(apart[0], apart[1], indices, *apart[2:]), expected)
    out = adatom.moe_routed(x, weights, indices, gate_up, down)
    torch.autograd.grad(out, x, torch.ones(1, dtype=F64).expand(6, 5))  # an expanded gradient


def test_what_is_kept_for_the_backward():
    """What the gate was given, unless it is computed again; never a copy of x for each pair."""

    def elements(**options):
        saved = []
        given = tensors(tokens=11, hidden=13, wide=3, experts=4, top_k=2)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            adatom.moe_routed(*given, **options)
        mine = [t for t in saved if t.is_floating_point() and all(t.data_ptr() != g.data_ptr() for g in given)]
        return sum(t.numel() for t in mine)

    assert elements() == 11 * 2 * 2 * 3
    assert elements(recompute=True) == 0


def test_the_same_bits_every_time():
    given = [t.detach() for t in tensors(200, 24, 16, 8, 3, dtype=torch.bfloat16)]
    for t in (0, 1, 3, 4):
        given[t].requires_grad_()
    wanted = [given[t] for t in (0, 1, 3, 4)]

    def run():
        out = adatom.moe_routed(*given)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), wanted)]

    assert all(torch.equal(a, b) for a, b in zip(run(), run()))
    torch.use_deterministic_algorithms(True)
    try:
        assert all(torch.equal(a, b) for a, b in zip(run(), run()))
    finally:
        torch.use_deterministic_algorithms(False)


# -- the order of pairs, and products of ragged groups -----------------------------------------------------------------


def test_order_and_offsets():
    indices = torch.tensor([[2, 0], [5, 2], [0, -1], [2, 0]])
    order, offsets = plan(indices, 4)
    assert order.tolist() == [1, 4, 7, 0, 3, 6, 2, 5] and order.dtype == torch.int32
    assert offsets.tolist() == [0, 3, 3, 6, 6] and offsets.dtype == torch.int32
    assert inverse_of(order).tolist() == [3, 0, 6, 4, 1, 7, 5, 2]
    assert plan(indices[:0], 4)[1].tolist() == [0] * 5


SIZES = {
    "even": [3, 3, 3],
    "empty": [0, 5, 0, 0, 2, 0],
    "one": [0, 0, 9, 0],
    "more groups than rows": [1, 0, 0, 1, 0, 0, 0, 1],
    "one group": [6],
    "a row": [0, 1],
    "none": [0, 0, 0],
}


@pytest.mark.parametrize("how", ["loop", "blocks", "grouped_mm"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("tail", [0, 4])
def test_products_of_ragged_groups(how, sizes, tail):
    """Also the ways that only a GPU takes; rows behind the last group give 0."""
    dtype = torch.float32 if how == "grouped_mm" else F64
    x, dy = torch.randn(sum(sizes) + tail, 8, dtype=dtype), torch.randn(sum(sizes) + tail, 16, dtype=dtype)
    weight = torch.randn(len(sizes), 16, 8, dtype=dtype)
    offsets = torch.tensor([0, *sizes]).cumsum(0).int()
    y, sums, start = torch.zeros(len(x), 16, dtype=dtype), torch.zeros_like(weight), 0
    for e, size in enumerate(sizes):
        y[start : start + size] = x[start : start + size] @ weight[e].T
        sums[e] = dy[start : start + size].T @ x[start : start + size]
        start += size
    torch.testing.assert_close(grouped(x, weight, offsets, how), y)
    torch.testing.assert_close(grouped(x, weight.mT.contiguous().mT, offsets, how), y)
    torch.testing.assert_close(outer(dy, x, offsets, how), sums)


def test_ways():
    """PyTorch's grouped product only where it neither waits for the host nor leaves anything unwritten."""

    def on(machine, dtype=torch.bfloat16, n=16, k=24, skip=0):
        x, w = (
            torch.empty(9, k + skip, dtype=dtype, device="meta")[:, :k],
            torch.empty(3, n, k, dtype=dtype, device="meta"),
        )
        with pretend(machine):
            return way(x, w), way(x[:, :n], w.mT), way(x, x[:, :n])

    a100, b200 = Device("cuda", 80, 108, 166912), Device("cuda", 100, 148, 232448)
    assert on(H100) == on(H100, skip=8) == ("grouped_mm",) * 3
    assert on(a100) == on(b200) == on(H100, torch.float16) == on(H100, torch.float32) == ("blocks",) * 3
    assert on(H100, n=12)[:2] == on(H100, k=20, n=16)[:2] == on(H100, skip=4)[:2] == ("blocks",) * 2
    assert on(Device("cpu", 0, 0, 0)) == ("loop",) * 3


def test_blocks_in_steps(monkeypatch):
    """Copies of matrices are made a few at a time."""
    monkeypatch.setattr("adatom.ops.moe.torch_grouped._COPIES", 3 * 16 * 8 * 8)
    x, weight = torch.randn(40, 8, dtype=F64), torch.randn(9, 16, 8, dtype=F64)
    offsets = torch.tensor([0, 1, 1, 2, 20, 22, 25, 30, 38, 39]).int()
    torch.testing.assert_close(grouped(x, weight, offsets, "blocks"), grouped(x, weight, offsets, "loop"))


# -- verify, PyTorch, autocast -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases.SMALL, ids=lambda case: case.name)
def test_cpu_rows_are_right(case):
    results = verify.examine_case(case, rows("moe_fwd") + rows("moe_bwd"), torch.device("cpu"))
    assert {r.backend for r in results} >= {"torch", "reference"}
    assert all(r.ok for r in results), [r for r in results if not r.ok]


@pytest.mark.parametrize("how", ["blocks", "grouped_mm"])
@pytest.mark.parametrize("case", cases.SMALL, ids=lambda case: case.name)
def test_the_ways_of_a_gpu_are_right(case, how, monkeypatch):
    """The whole row, on a CPU: blocks, and for what it takes PyTorch's grouped product."""
    if how == "grouped_mm" and (case.dtype != torch.bfloat16 or case.hidden % 8 or case.intermediate % 8):
        how = "blocks"
    monkeypatch.setattr("adatom.ops.moe.torch_grouped.way", lambda *tensors: how)
    mine = [row for row in rows("moe_fwd") + rows("moe_bwd") if row.backend == "torch"]
    results = verify.examine_case(case, mine, torch.device("cpu"))
    assert len(results) == 2 and all(r.ok for r in results), results


@pytest.mark.parametrize("how", ["grouped_mm", "blocks"])
def test_the_host_never_waits(how, monkeypatch):
    """On tensors without values: whatever asks for a number of theirs raises."""
    monkeypatch.setattr("adatom.ops.moe.torch_grouped.way", lambda *tensors: how)
    with FakeTensorMode():
        x, weights, _, gate_up, down = (t.detach() for t in tensors(64, 32, 16, 8, 2, dtype=torch.bfloat16))
        logits = torch.randn(64, 8)
        options = {"scoring": "sigmoid", "groups": (4, 2), "selection_bias": logits[0], "capacity": 20}
        routed = adatom.moe_route(logits, 2, **options)
        adatom.load_balancing_loss(logits, routed[1], mask=logits[:, 0] > 0)
        inputs, o = Inputs(x, *routed, gate_up, down), Options("silu")
        out, pre, order, offsets = torch_moe.forward(inputs, o, True)
        assert out.shape == x.shape and pre.shape == (128, 32) and pre.is_contiguous()
        for kept in (pre, None):
            grads = torch_moe.backward(inputs, o, kept, order, offsets, torch.ones_like(x), (True,) * 4)
            assert [g.shape for g in grads] == [t.shape for t in (x, weights, gate_up, down)]
        with pytest.raises(DataDependentOutputException):
            offsets.tolist()


def _one_pair_less(x, o, keep):
    indices = x.indices.clone()
    indices[-1, -1] = -1
    return reference.forward(x._replace(indices=indices), o, keep)


def _another_order(x, o, keep):
    out, pre, order, offsets = reference.forward(x, o, keep)
    swapped = order.clone()
    swapped[:2] = order[:2].flip(0)
    return out, pre, swapped, offsets


def _unweighted(x, o, *rest):
    dx, *others = reference.backward(x, o, *rest)
    return reference.backward(x._replace(weights=torch.ones_like(x.weights)), o, *rest)[0], *others


def _without_the_last_expert(x, o, *rest):
    *others, dw_down = reference.backward(x, o, *rest)
    dw_down[-1] = 0
    return *others, dw_down


@pytest.mark.parametrize(
    "op, wrong",
    [
        ("moe_fwd", _one_pair_less),
        ("moe_fwd", _another_order),
        ("moe_bwd", _unweighted),
        ("moe_bwd", _without_the_last_expert),
    ],
)
def test_wrong_kernels_are_refused(op, wrong):
    case = next(c for c in cases.SMALL if c.name == "f32 silu")
    row = Row(op, "wrong", wrong, lambda problem: None)
    assert not any(r.ok for r in verify.examine_case(case, [row], torch.device("cpu")))


def test_huge_cases_are_judged_by_their_ends(monkeypatch):
    """The first and last tokens, and the last features of the experts."""
    case = next(c for c in cases.SMALL if c.name == "bf16 silu")._replace(lead=(200,), routing="dropped")
    monkeypatch.setattr(cases.Case, "huge", property(lambda self: True))
    trial = Trial(case, torch.device("cpu"))
    forward = reference.forward(*trial.arguments("moe_fwd"))
    backward = reference.backward(*trial.arguments("moe_bwd", *forward))

    def ratios(op, results):
        parts = trial.parts(verify.named(op, results))
        assert parts
        return [verify.judge(part, op, some)[1] for part, some in parts]

    assert all(r <= 1 for r in (*ratios("moe_fwd", forward), *ratios("moe_bwd", backward)))
    for i, broken in enumerate(backward):
        broken[..., -1:] += 1
        assert max(ratios("moe_bwd", backward)) > 1, i
        broken[..., -1:] -= 1
    forward[0][-1] = 0
    assert max(ratios("moe_fwd", forward)) > 1


def test_rivals_compute_the_same():
    case = next(c for c in cases.SMALL if c.name == "bf16 silu")
    given = cases.make(case, "cpu")
    names = rivals_moe.TENSORS
    want = adatom.moe_routed(**given)
    for rival in rivals_moe.RIVALS[:2]:
        got = rival.bind(case, given)(*(given[n] for n in names))
        torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)
        with pytest.raises(rivals.Unfit):
            rival.bind(case._replace(routing="dropped"), given)
    assert rivals_moe.passes("moe_decode", case) == ("forward",) and len(rivals_moe.passes("moe", case)) == 2


def test_cases():
    names = [case.name for case in (*cases.GPU, *cases.COMPILE)]
    assert len({c.name for c in cases.GPU}) == len(cases.GPU) and set(cases.COMPILE_QUICK) <= set(names)
    assert sum(case.huge for case in cases.GPU) == 1 and not any(case.huge for case in cases.SMALL)
    case = cases.BENCH["moe"][0]
    assert cases.flops(case, "moe_fwd") == 3 * 2 * 16384 * 4096 * 14336
    assert cases.flops(case, "moe_bwd") == 2 * cases.flops(case, "moe_fwd")
    one = next(c for c in cases.BENCH["moe_decode"] if c.name == "mixtral 1 tokens")
    assert cases.bytes_moved(one, "moe_fwd") == pytest.approx(2 * 3 * 2 * 4096 * 14336, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled(dtype):
    x, _, _, gate_up, down = tensors(dtype=dtype)
    logits = torch.randn(7, 4, requires_grad=True)

    def step(x, logits, gate_up, down):
        return adatom.moe(x, logits, gate_up, down, top_k=2, scoring="sigmoid", groups=(2, 1, 1), capacity=3) * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    given = (x, logits, gate_up, down)
    got, want = compiled(*given), step(*given)
    torch.testing.assert_close(got, want)
    for g, e in zip(torch.autograd.grad(got.sum(), given), torch.autograd.grad(want.sum(), given)):
        torch.testing.assert_close(g, e)


@pytest.mark.parametrize("keep", [True, False])
def test_opcheck(keep):
    given = tensors(dtype=torch.float32)
    call = (*given, "silu", None)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.adatom.moe_fwd.default, (*call, keep), test_utils=tests)
    out, pre, order, offsets = torch.ops.adatom.moe_fwd.default(*call, keep)
    rest = (pre.detach() if keep else None, order, offsets, torch.randn(7, 5, requires_grad=True))
    for needs in ((True,) * 4, (True, False, True, False), (False, True, False, True)):
        every = (*tests, "test_aot_dispatch_dynamic")
        torch.library.opcheck(torch.ops.adatom.moe_bwd.default, (*call, *rest, *needs), test_utils=every)
    ragged = (torch.randn(14, 5, requires_grad=True), given[3], offsets)
    torch.library.opcheck(torch.ops.adatom.moe_grouped.default, ragged, test_utils=tests)
    pair = (torch.randn(14, 6, requires_grad=True), torch.randn(14, 5, requires_grad=True), offsets)
    torch.library.opcheck(torch.ops.adatom.moe_outer.default, pair, test_utils=tests)
    turned = [t.detach().mT.contiguous().mT for t in given[3:]]  # experts that are stored transposed
    plain = [None if t is None else t.detach() for t in (*given[:3], *rest)]
    for backend in (None, "reference"):
        call = (*plain[:3], *turned, "silu", backend, *plain[3:], *[True] * 4)
        torch.library.opcheck(torch.ops.adatom.moe_bwd.default, call, test_utils=tests[:2])


def test_autocast():
    x, weights, indices, gate_up, down = tensors(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = adatom.moe_routed(x, weights, indices, gate_up, down)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert gate_up.grad.dtype == x.grad.dtype == weights.grad.dtype == torch.float32


# -- bad input, choices, the module ------------------------------------------------------------------------------------

GOOD = {
    "x": torch.zeros(3, 4),
    "weights": torch.zeros(3, 2),
    "indices": torch.zeros(3, 2, dtype=torch.int64),
    "w_gate_up": torch.zeros(5, 6, 4),
    "w_down": torch.zeros(5, 4, 3),
}
BAD = {
    "no tensor": ({"weights": 1.0}, TypeError, r"tensors; got .*weights=1.0"),
    "sparse": ({"x": torch.zeros(3, 4).to_sparse()}, TypeError, "not sparse or nested"),
    "dtypes": ({"w_down": torch.zeros(5, 4, 3, dtype=F64)}, TypeError, "one dtype.*w_down=float64"),
    "integers": ({"x": torch.zeros(3, 4, dtype=torch.int32)}, TypeError, "one dtype.*x=int32"),
    "weights": ({"weights": torch.zeros(3, 2, dtype=torch.int64)}, TypeError, "floating weights"),
    "indices": ({"indices": torch.zeros(3, 2)}, TypeError, "indices of int32 or int64"),
    "device": ({"indices": GOOD["indices"].to("meta")}, ValueError, "one device.*on meta"),
    "no gate": ({"w_gate_up": torch.zeros(5, 3, 4)}, ValueError, r"2 \* intermediate.*w_gate_up=float32\[5, 3, 4\]"),
    "experts": ({"w_gate_up": torch.zeros(4, 6, 4)}, ValueError, r"w_down \(experts, hidden, intermediate\)"),
    "features": ({"x": torch.zeros(3, 5)}, ValueError, r"x \(\.\.\., hidden\).*x=float32\[3, 5\]"),
    "scalar": ({"x": torch.zeros(())}, ValueError, r"x \(\.\.\., hidden\)"),
    "top_k": ({"weights": torch.zeros(3, 1)}, ValueError, r"weights and indices \(\.\.\., top_k\)"),
    "tokens": ({"x": torch.zeros(2, 4)}, ValueError, r"weights and indices \(\.\.\., top_k\)"),
    "activation": ({"activation": "tanh"}, ValueError, "relu, gelu.*'tanh'"),
    "no activation": ({"activation": None}, ValueError, "relu, gelu.*got activation=None"),
    "backend": ({"backend": "cudnn"}, ValueError, "no backend 'cudnn' for moe_fwd"),
    "backend list": ({"backend": []}, TypeError, "a backend by name, or None"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_answered(name):
    wrong, error, message = BAD[name]
    with pytest.raises(error, match=f"(?s){message}"):
        adatom.moe_routed(**{**GOOD, **wrong})


def test_bad_logits_are_answered():
    experts = GOOD["w_gate_up"], GOOD["w_down"]
    with pytest.raises(ValueError, match="a logit for each expert"):
        adatom.moe(torch.zeros(3, 4), torch.zeros(3, 6), *experts, top_k=2)
    with pytest.raises(ValueError, match=r"router_logits \(\.\.\., experts\), one device"):
        adatom.moe(torch.zeros(3, 4), torch.zeros(2, 5), *experts, top_k=2)
    with pytest.raises(TypeError, match="router_logits"):
        adatom.moe(torch.zeros(3, 4), None, *experts, top_k=2)
    with pytest.raises(TypeError, match="tensors; got.*w_down=None"):
        adatom.moe(torch.zeros(3, 4), torch.zeros(3, 5), experts[0], None, top_k=2)


def test_explain():
    routed = adatom.explain("moe", **GOOD)
    logits = adatom.explain("moe", GOOD["x"], torch.zeros(3, 5), GOOD["w_gate_up"], GOOD["w_down"], top_k=2)
    assert routed == logits and [(v.op, v.backend) for v in routed if v.chosen] == [
        ("moe_fwd", "torch"),
        ("moe_bwd", "torch"),
    ]
    with pytest.raises(ValueError, match="a logit for each expert"):
        adatom.explain("moe", GOOD["x"], torch.zeros(3, 6), GOOD["w_gate_up"], GOOD["w_down"], top_k=2)


def test_what_a_choice_sees():
    given = [t.detach().to("meta") for t in tensors(5000, 64, 32, 8, dtype=torch.bfloat16)]
    with pretend(H100):
        x, o, recompute, _ = inputs_of(*given, recompute=True)
        posed = problem(x, o, recompute)
    assert (posed.tokens, posed.hidden, posed.intermediate, posed.experts, posed.top_k) == (8192, 64, 32, 8, 2)
    assert posed.aligned and posed.recompute and posed.weights_dtype == torch.bfloat16
    few = posed._replace(tokens=256)  # 64 rows of an expert
    assert [choose(op, few).backend for op in ("moe_fwd", "moe_bwd")] == ["triton", "triton"]
    some = posed._replace(tokens=512)
    assert [choose(op, some).backend for op in ("moe_fwd", "moe_bwd")] == ["hopper", "hopper"]
    assert choose("moe_fwd", posed).backend == "hopper" and choose("moe_fwd", posed, "triton").backend == "triton"
    with pretend(H100):
        assert not problem(x._replace(x=given[0][:, 1:]), o).aligned


def test_module():
    torch.manual_seed(0)
    m = MoE(6, 5, 4, 2, shared=3, scoring="sigmoid", selection_bias=True, groups=(2, 1), scale=1.5, dtype=F64)
    m.selection_bias.copy_(torch.randn(4))
    assert {n for n, _ in m.named_parameters()} == {"router", "gate_up", "down", "shared_gate_up", "shared_down"}
    x = torch.randn(2, 7, 6, dtype=F64, requires_grad=True)
    out, logits, indices = m(x, return_routing=True)
    options = {"scoring": "sigmoid", "selection_bias": m.selection_bias, "groups": (2, 1), "scale": 1.5}
    weights, expected = adatom.moe_route(x @ m.router.T, 2, **options)
    assert torch.equal(indices, expected) and torch.equal(logits, x @ m.router.T)
    flat = [t.reshape(14, -1) for t in (x, weights, indices)]
    gate, up = (x @ m.shared_gate_up.T).chunk(2, -1)
    want = plainly(*flat, m.gate_up, m.down).view(x.shape) + (F.silu(gate) * up) @ m.shared_down.T
    torch.testing.assert_close(out, want)
    out.sum().backward()
    assert all(p.grad is not None for p in m.parameters())
    assert torch.equal(m(x), out) and "experts=4" in repr(m)
