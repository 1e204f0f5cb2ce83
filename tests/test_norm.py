"""rms_norm and layer_norm: values and derivatives, dtypes, layouts, transforms and modules, without a GPU."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

import adatom
from adatom import device, registry, signature, verify
from adatom import nn as modules
from adatom.device import Device
from adatom.ops.norm import api, cases, limits, op, reference, trial
from adatom.ops.norm.problem import problem

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
H100 = Device("cuda", 90, 132, 232448)
NORMS = (adatom.rms_norm, adatom.layer_norm)
pytestmark = pytest.mark.usefixtures("one_thread")


def drawn(*shape, dtype=F64, grad=True):
    return torch.randn(shape, dtype=dtype).requires_grad_(grad)


def arguments(norm, n=7, rows=(2, 3), dtype=F64, residual=False):
    """x, weight, bias (of layer_norm) and residual."""
    given = [drawn(*rows, n, dtype=dtype), drawn(n, dtype=dtype)]
    if norm is adatom.layer_norm:
        given.append(drawn(n, dtype=dtype))
    return (*given, drawn(*rows, n, dtype=dtype)) if residual else tuple(given)


def called(norm, *given, residual=False, **options):
    """norm of `arguments`."""
    return norm(*given[:-1], residual=given[-1], **options) if residual else norm(*given, **options)


@pytest.mark.parametrize("case", cases.SMALL, ids=lambda case: case.name)
def test_every_row_agrees_with_float64(case):
    rows = verify.rows_of("norm")
    results = verify.run(cases=(case,), rows=rows, device="cpu")
    assert {r.backend for r in results} >= {"torch", "reference"}
    assert all(r.ok for r in results), [r for r in results if not r.ok]


def test_the_kernels_agree_with_float64_in_the_interpreter():
    """Every small case, again with rows in chunks or shared out, and beyond all tiles, which small ones are not."""
    program = """
from adatom import verify
from adatom.ops.norm import cases, triton_bwd, triton_bwd_apart, triton_fwd, triton_rows
from adatom.ops.norm.triton_bwd_apart import Share
from adatom.ops.norm.triton_rows import Config

def check():
    triton_rows._built.clear()
    rows = [row for row in verify.rows_of("norm") if row.backend == "triton"]
    small = [case for case in cases.SMALL if case.dtype.itemsize < 8]
    results = verify.run(cases=small, rows=rows, device="cpu")
    assert len(results) == 2 * len(small), len(results)
    assert all(r.ok for r in results), [r for r in results if not r.ok]

check()
triton_fwd.CONFIGS = triton_fwd.LAYER = triton_fwd.RESIDUAL = {(size, 2**14): Config(1, 4, chunks=4) for size in (2, 4)}
triton_bwd.CONFIGS = {}
triton_bwd_apart.SHARES = {size: (Share(512, 4, 1, 2),) for size in (2, 4)}  # no teams: programs run one by one
check()
triton_fwd.CONFIGS = triton_fwd.LAYER = triton_fwd.RESIDUAL = {}
triton_bwd_apart.LARGEST = 0
triton_fwd.LONG_BLOCK = triton_bwd.LONG_BLOCK = triton_bwd.COLUMNS_BLOCK = 32
check()
"""
    environment = {"TRITON_INTERPRET": "1", "PATH": "", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def finishes(programs, team, rows, slots, seed, drawn=True):
    """Whether programs of `apart_kernel` all end, started and stepped in random order, of which `slots` run at a time.

    A program leaves the note of its first row; then, for each row, that of its next one, and waits until the whole team
    has left that of the row. drawn: its place is drawn as it begins, as in the kernel, not its number.
    """
    random_ = random.Random(seed)
    waiting = random_.sample(range(programs), programs)
    running, left, begun, done = [], set(), 0, 0
    while done < programs:
        while waiting and len(running) < slots:
            place, begun = (begun if drawn else waiting[0]), begun + 1
            waiting.pop(0)
            mine = range(place // team, rows, programs // team)
            left.update((row, place % team) for row in mine[:1])
            running.append((place, 0))
        able = [
            (place, k)
            for place, k in running
            for mine in [range(place // team, rows, programs // team)]
            if k == len(mine) or all((mine[k], p) in left for p in range(team))
        ]
        if not able:
            return False
        place, k = random_.choice(able)
        running.remove((place, k))
        mine = range(place // team, rows, programs // team)
        if k == len(mine):
            done += 1
            continue
        left.update((row, place % team) for row in mine[k + 1 : k + 2])
        running.append((place, k + 1))
    return True


@pytest.mark.parametrize("team", [2, 3, 4, 16])
def test_programs_that_share_rows_end(team):
    """As long as there is room for a team, whatever order programs start and run in, and only because places are drawn
    in the order in which they start."""
    for seed in range(20):
        for slots in (team, 2 * team + 1, 8 * team):
            assert finishes(8 * team, team, 37, slots, seed)
    assert not all(finishes(8 * team, team, 37, 2 * team - 1, seed, drawn=False) for seed in range(20))


def test_how_rows_are_shared_out():
    """By the share that leaves fewest columns idle, to a team that fits; the interpreter has no teams."""
    program = """
from adatom.ops.norm.triton_bwd_apart import share_of
for size, length, sms, columns in (
    (2, 32768, 132, 8192), (2, 12288, 132, 4096), (2, 131072, 132, 8192), (2, 131073, 132, None), (2, 32768, 4, 8192),
    (2, 32768, 3, None), (2, 12288, 2, 4096), (4, 32768, 132, 4096), (4, 65537, 132, None), (2, 12288, 0, None),
):
    found = share_of(size, length, sms)
    assert (found and found.columns) == columns, (size, length, sms, found)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_wrong_backward_is_refused():
    def forgetful(*args):
        dx, *rest = reference.backward(*args)
        return dx - dx.mean(-1, keepdim=True) * 0.05, *rest

    case = next(c for c in cases.SMALL if c.name == "f32 rms")
    row = registry.Row("norm_bwd", "wrong", forgetful, limits.reference)
    assert not any(r.ok for r in verify.run(cases=(case,), rows=(row,), device="cpu"))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", (F32, F64))
def test_it_is_what_pytorch_computes(norm, dtype):
    x, w, *b = arguments(norm, 33, dtype=dtype)
    theirs = F.layer_norm(x, (33,), w, *b, 1e-5) if b else F.rms_norm(x, (33,), w, 1e-6)
    ours = norm(x, w, *b)
    torch.testing.assert_close(ours, theirs)
    dy = torch.randn_like(x)
    for mine, yours in zip(
        torch.autograd.grad(ours, (x, w, *b), dy), torch.autograd.grad(theirs, (x, w, *b), dy), strict=True
    ):
        torch.testing.assert_close(mine, yours)


@pytest.mark.parametrize("residual", (False, True))
@pytest.mark.parametrize("norm", NORMS)
def test_first_and_second_derivatives(norm, residual):
    given = arguments(norm, residual=residual)

    def call(*given):
        return called(norm, *given, residual=residual, eps=0.1)

    assert gradcheck(call, given, check_forward_ad=True)
    assert gradgradcheck(call, given, check_fwd_over_rev=True)


@pytest.mark.parametrize("norm", NORMS)
def test_derivatives_where_some_are_wanted(norm):
    """Without weight and bias, and with one of them frozen."""
    x, w, *b = arguments(norm)
    assert gradgradcheck(lambda x: norm(x), (x,))
    assert gradgradcheck(lambda w: norm(x.detach(), w, *(t.detach() for t in b)), (w,))
    (dx,) = torch.autograd.grad(norm(x, w.detach(), *b).square().sum(), (x,))
    assert dx.shape == x.shape
    y, h = norm(x, w, *b, residual=x.detach())
    (dx,) = torch.autograd.grad(h.square().sum(), (x,))  # through the new residual alone
    torch.testing.assert_close(dx, 2 * h)


@pytest.mark.parametrize("norm", NORMS)
def test_third_derivatives_are_right(norm):
    x, w, *b = arguments(norm, 5, (2,))

    def gradient(x, w):
        y = norm(x, w, *(t.detach() for t in b), eps=0.1)
        return torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)[0]

    assert gradgradcheck(gradient, (x, w))


@pytest.mark.parametrize("norm", NORMS)
def test_transforms(norm):
    x, w, *b = (t.detach() for t in arguments(norm, rows=(4, 3)))

    def loss(x):
        return norm(x, w, *b).square().sum()

    each = torch.func.vmap(torch.func.grad(loss))(x)
    torch.testing.assert_close(each, torch.stack([torch.func.grad(loss)(one) for one in x]))
    for of, at in ((loss, x[0, 0]), (loss, x[0]), (lambda w: norm(x[0], w, *b).square().sum(), w)):
        for vectorize in (False, True):
            hessian = torch.autograd.functional.hessian(of, at, vectorize=vectorize)
            torch.testing.assert_close(hessian, torch.func.hessian(of)(at))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("residual", (False, True))
def test_the_short_way_computes_the_same(norm, residual, monkeypatch):
    """What a GPU takes in eager mode, past the dispatcher: values, first and second derivatives."""
    given = arguments(norm, residual=residual)

    def call(*given):
        return called(norm, *given, residual=residual, eps=0.1)

    def everything():
        out = call(*given)
        out = (out,) if isinstance(out, torch.Tensor) else out
        grads = torch.autograd.grad([y.pow(3).sum() for y in out], given, create_graph=True)
        plain = torch.autograd.grad([y.pow(3).sum() for y in call(*given)] if residual else call(*given).sum(), given)
        seconds = torch.autograd.grad(sum(g.square().sum() for g in grads), given)
        with torch.no_grad():
            quiet = call(*given)
        return *out, *grads, *plain, *seconds, *(quiet if residual else (quiet,))

    want = everything()
    api._plans.clear()
    monkeypatch.setattr(signature, "ANY_DEVICE", True)
    got = everything()
    assert len(api._plans) == 1
    torch.testing.assert_close(got, want)
    if residual:
        *_, r = given
        (dr,) = torch.autograd.grad(call(*given)[1].sum(), (r,))
        assert torch.equal(dr, torch.ones_like(r))
        (dr,) = torch.autograd.grad(call(*(t.detach() for t in given[:-1]), r)[0].sum(), (r,))
        torch.testing.assert_close(dr, torch.autograd.grad(call(*given)[0].sum(), given[0])[0])


@pytest.mark.parametrize("norm", NORMS)
def test_statistics_are_kept_for_a_backward_alone(norm, monkeypatch):
    monkeypatch.setattr(signature, "ANY_DEVICE", True)
    monkeypatch.setattr(api, "_plans", {})
    given, kept = arguments(norm), []
    norm(*given)
    (plan,) = api._plans.values()
    launch = plan.forward
    monkeypatch.setattr(plan, "forward", lambda *args: kept.append(launch(*args)[2:]) or launch(*args))
    norm(*given).sum().backward()
    with torch.no_grad():
        norm(*given)
    norm(*(t.detach() for t in given))
    with_backward, *without = kept
    assert with_backward[1] is not None and (with_backward[0] is None) == (norm is adatom.rms_norm)
    assert without == [(None, None)] * 2


@pytest.mark.parametrize("norm", NORMS)
def test_gradients_for_many_cotangents_take_the_long_way(norm, monkeypatch):
    """They have no addresses, which kernels need."""
    monkeypatch.setattr(signature, "ANY_DEVICE", True)
    monkeypatch.setattr(api, "_plans", {})
    addresses, launch = [], op.on_device

    def spy(*args):
        addresses.append([t.data_ptr() for t in args if isinstance(t, torch.Tensor)])
        return launch(*args)

    monkeypatch.setattr(op, "on_device", spy)
    x, w = drawn(3, 4, 6), drawn(6)
    jacobians = [torch.autograd.functional.jacobian(lambda x: norm(x, w), x, vectorize=v) for v in (False, True)]
    torch.testing.assert_close(*jacobians)
    assert addresses


def test_what_must_be_copied_takes_the_long_way(monkeypatch):
    """A plan hands tensors on as they are, but kernels read the numbers of a weight one after the other."""
    monkeypatch.setattr(signature, "ANY_DEVICE", True)
    monkeypatch.setattr(api, "_plans", {})
    x, w = torch.randn(3, 8), torch.randn(8, 2)[:, 0]
    assert not w.is_contiguous()
    torch.testing.assert_close(adatom.rms_norm(x, w), adatom.rms_norm(x, w.clone()))
    assert len(api._plans) == 1  # of the clone


def test_the_short_way_tells_calls_apart(monkeypatch):
    monkeypatch.setattr(signature, "ANY_DEVICE", True)
    api._plans.clear()
    x = torch.randn(3, 8)
    adatom.rms_norm(x)
    with pytest.raises(NotImplementedError, match="needs a CUDA device"):
        adatom.rms_norm(x, backend="triton")
    adatom.rms_norm(x, eps=1e-3)
    adatom.layer_norm(x)
    assert len(api._plans) == 3
    with torch.autograd.profiler.profile() as profile:  # which shows operators, not what goes past them
        adatom.rms_norm(x, eps=0.5)
    assert "adatom::norm_fwd" in {event.key for event in profile.key_averages()} and len(api._plans) == 3


def test_dtypes_of_results():
    x, r = drawn(4, 16, dtype=BF16), drawn(4, 16, dtype=F32)
    w = drawn(16, dtype=F32)
    y = adatom.rms_norm(x, w)
    assert y.dtype == BF16
    dx, dw = torch.autograd.grad(y.float().sum(), (x, w))
    assert (dx.dtype, dw.dtype) == (BF16, F32)
    y, h = adatom.rms_norm(x, w, residual=r)
    assert (y.dtype, h.dtype) == (BF16, F32)
    dx, dr = torch.autograd.grad(y.float().sum() + h.sum(), (x, r))
    assert (dx.dtype, dr.dtype) == (BF16, F32)
    torch.testing.assert_close(dx, dr.to(BF16))


def test_a_residual_is_added_as_pytorch_adds_it():
    x, r, w = drawn(9, 40, dtype=BF16), drawn(9, 40, dtype=BF16), drawn(40, dtype=BF16)
    y, h = adatom.rms_norm(x, w, residual=r)
    assert torch.equal(h, x + r)
    assert torch.equal(y, adatom.rms_norm(x + r, w))


@pytest.mark.parametrize("shape", ((), (0,), (0, 3), (2, 0)))
@pytest.mark.parametrize("norm", NORMS)
def test_empty_and_single(norm, shape):
    for n in (0, 1, 6):
        given = arguments(norm, n, shape, F32)
        y = norm(*given)
        assert y.shape == (*shape, n) and not y.isnan().any()
        grads = torch.autograd.grad(y.sum(), given)
        assert [g.shape for g in grads] == [t.shape for t in given]
        assert not any(g.isnan().any() for g in grads)


def test_results_are_contiguous_whatever_x_is():
    x = torch.randn(5, 3, 8).transpose(0, 1)
    y, h = adatom.layer_norm(x, residual=x)
    assert y.is_contiguous() and h.is_contiguous()
    (again, _), _ = torch.func.jvp(lambda x: adatom.layer_norm(x, residual=x), (x,), (x,))
    assert again.is_contiguous() and torch.func.vmap(adatom.rms_norm)(x).is_contiguous()
    torch.testing.assert_close(y, F.layer_norm(x + x, (8,)))


def test_wrong_arguments():
    x, w = torch.randn(2, 8), torch.randn(8)
    with pytest.raises(ValueError, match=r"weight and bias \(length,\).*float32\[7\]"):
        adatom.rms_norm(x, w[:7])
    with pytest.raises(ValueError, match="residual of x's shape"):
        adatom.rms_norm(x, w, residual=x[0])
    with pytest.raises(TypeError, match="float16, bfloat16"):
        adatom.rms_norm(x.int(), w)
    for eps in (-1e-6, float("nan"), float("inf"), None, "1e-6"):
        with pytest.raises(ValueError, match=f"a finite eps >= 0; got eps={eps!r}"):
            adatom.rms_norm(x, w, eps=eps)
    for bad in ((x, 2.0), ([1.0], w)):
        with pytest.raises(TypeError, match="expected tensors; got"):
            adatom.layer_norm(*bad)
    for bad in ((x.to_sparse(), w), (x, w.to_sparse())):
        with pytest.raises(TypeError, match="not sparse or nested"):
            adatom.rms_norm(*bad)
    with pytest.raises(ValueError, match="one device"):
        adatom.layer_norm(x, w.to("meta"))
    with pytest.raises(NotImplementedError, match="needs a CUDA device"):
        adatom.layer_norm(x, w, backend="triton")
    for backend in (1, ["torch"]):
        with pytest.raises(TypeError, match="a backend by name, or None"):
            adatom.rms_norm(x, w, backend=backend)


def test_explain():
    table = adatom.explain("norm", torch.randn(2, 8), torch.randn(8))
    assert [(v.op, v.backend) for v in table if v.chosen] == [("norm_fwd", "torch"), ("norm_bwd", "torch")]
    with pytest.raises(ValueError, match="a finite eps >= 0"):
        adatom.explain("rms_norm", torch.randn(2, 8), eps=-1.0)
    with pytest.raises(TypeError, match="epsilon"):
        adatom.explain("rms_norm", torch.randn(2, 8), epsilon=1.0)


def test_what_runs_on_a_gpu():
    def chosen(x, *rest, where=H100):
        with device.pretend(where):
            return registry.choose("norm_fwd", problem(x, *rest, centred=False)).backend

    x, w = torch.empty(4, 64, dtype=BF16), torch.empty(64)
    assert chosen(x, None, w, None) == "triton"
    assert chosen(x, x.float(), None, None) == "triton"
    assert chosen(x.double(), None, None, None) == "torch"
    assert chosen(x, None, w.double(), None) == "torch"
    assert chosen(x, None, w, None, where=H100._replace(arch=75)) == "torch"


def test_autocast_of_a_cpu_changes_nothing():
    """As PyTorch's: on CPUs its norms are on no list; on CUDA they run in float32."""
    x, w = torch.randn(4, 8, dtype=BF16), torch.randn(8, dtype=BF16)
    with torch.autocast("cpu", BF16):
        assert adatom.layer_norm(x, w).dtype == F.layer_norm(x, (8,), w).dtype == BF16


@pytest.mark.parametrize("norm", NORMS)
def test_compiled(norm):
    given = arguments(norm, 16, (3, 4), F32, residual=True)

    def step(*given):
        y, h = called(norm, *given, residual=True)
        return y * 2 + h

    ours = torch.compile(step, fullgraph=True, backend="aot_eager")(*given)
    torch.testing.assert_close(ours, step(*given))
    dy = torch.randn_like(ours)
    for mine, yours in zip(torch.autograd.grad(ours, given, dy), torch.autograd.grad(step(*given), given, dy)):
        torch.testing.assert_close(mine, yours)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("residual", (False, True))
def test_operators_pass_opcheck(norm, residual):
    given = arguments(norm, 16, (3, 4), F32)
    x, w, b = (*given, None)[:3]
    r = drawn(3, 4, 16, dtype=F32) if residual else None
    centred = norm is adatom.layer_norm
    call = (x, r, w, b, 1e-5, centred, None)
    torch.library.opcheck(torch.ops.adatom.norm_fwd.default, call)
    y, h, mean, rstd = (t.detach() for t in torch.ops.adatom.norm_fwd(*call))
    h = h.requires_grad_() if residual else x
    back = (h, w, b, drawn(3, 4, 16, dtype=F32), y if residual else None, mean, rstd, 1e-5, centred, None, True, True)
    torch.library.opcheck(torch.ops.adatom.norm_bwd.default, back)


@pytest.mark.parametrize(
    "ours, theirs",
    (
        (modules.RMSNorm(8), torch.nn.RMSNorm(8, 1e-6)),
        (modules.RMSNorm(8, None, False), torch.nn.RMSNorm(8, None, False)),
        (modules.LayerNorm(8), torch.nn.LayerNorm(8)),
        (modules.LayerNorm(8, 1e-3, bias=False), torch.nn.LayerNorm(8, 1e-3, bias=False)),
    ),
)
def test_modules_take_the_state_of_pytorchs(ours, theirs):
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 5, 8)
    torch.testing.assert_close(ours(x), theirs(x))
    y, h = ours(x, residual=x)
    torch.testing.assert_close((y, h), (theirs(2 * x), 2 * x))
    assert list(ours.state_dict()) == list(theirs.state_dict())


def test_modules_normalise_one_dimension():
    with pytest.raises(ValueError, match="one dimension"):
        modules.RMSNorm((2, 3))


def test_huge_cases_are_judged_by_parts(monkeypatch):
    """The parts of a case judged as if it were huge hold what the whole holds, and a wrong sum shows."""
    monkeypatch.setattr(trial, "_CHUNK", 64)
    case = cases.SMALL[2]._replace(lead=(200,), name="judged by parts")

    class Huge(type(case)):
        huge = True

    one = trial.Trial(case, torch.device("cpu"))
    one.case = Huge(*case)
    results = verify.named("norm_bwd", reference.backward(*one.arguments("norm_bwd")))
    judged = [verify.judge(part, "norm_bwd", some) for part, some in one.parts(results)]
    assert len(judged) == 3 and all(ratio <= 1 for _, ratio, _ in judged), judged
    results["dweight"] = results["dweight"] * 1.01
    assert verify.judge(*[(part, "norm_bwd", some) for part, some in one.parts(results)][-1])[1] > 1


def test_cases_reach_every_tile():
    from adatom.ops.norm import triton_bwd, triton_fwd

    for kernels in (triton_fwd, triton_bwd):
        for size, length in kernels.CONFIGS:
            found = [c for c in (*cases.GPU, *cases.COMPILE) if c.dtype.itemsize == size and c.length == length]
            assert {c.op for c in found} == {"norm"} and len(found) >= 3
    assert max(c.length for c in cases.GPU) > max(length for _, length in triton_bwd.CONFIGS)
    assert any(c.huge for c in cases.GPU)


def test_bench_groups_hold_the_shapes_to_beat():
    shapes = {(c.rows, c.length) for group in cases.BENCH.values() for c in group}
    assert shapes == {(32768, 1024), (32768, 4096), (8192, 8192), (4096, 32768)}
    case = cases.BENCH["rms"][0]
    assert cases.bytes_moved(case, "norm_fwd") == 4 * 32768 * 1024
    assert cases.bytes_moved(case, "norm_bwd") == 6 * 32768 * 1024
    assert api.problem_of(**cases.make(case._replace(lead=(2,)), "cpu"))[0].length == 1024


def test_a_cpu_takes_few_passes(monkeypatch):
    """float32 runs in PyTorch's kernels or in place; the reference, which keeps every step, is for other dtypes."""

    def unwanted(*_):
        raise AssertionError("the reference")

    x, r, w, b = (t.requires_grad_() for t in (*torch.randn(2, 3, 5, 8), *torch.randn(2, 8)))
    want = F.layer_norm(x + r, (8,), w, b)
    monkeypatch.setattr(reference, "forward", unwanted)
    monkeypatch.setattr(reference, "backward", unwanted)
    torch.testing.assert_close(adatom.rms_norm(x, w), F.rms_norm(x, (8,), w, 1e-6))
    got, h = adatom.layer_norm(x, w, b, residual=r)
    torch.testing.assert_close(got, want)
    expanded = torch.ones(()).expand(3, 5, 8)
    grads = [torch.autograd.grad((y, s), (x, r, w, b), (expanded, expanded)) for y, s in ((got, h), (want, x + r))]
    torch.testing.assert_close(*grads)
    with pytest.raises(AssertionError, match="the reference"):
        adatom.rms_norm(x.bfloat16())


def test_the_page_names_every_file():
    page = (Path(__file__).parents[1] / "docs" / "norm.md").read_text()
    assert all(name in page for name in ("triton_fwd.py", "triton_bwd.py", "torch_norm.py", "reference.py"))


def test_the_callers_gradient_is_no_result():
    x, b, dy = torch.randn(8, requires_grad=True), torch.zeros(8, requires_grad=True), torch.ones(8)
    _, db = torch.autograd.grad(adatom.layer_norm(x, None, b), (x, b), dy)
    db.zero_()
    assert dy.sum() == 8


def test_eps_of_none_is_that_of_float32():
    x = torch.randn(5, 16, dtype=torch.bfloat16) * 0.02
    ours, theirs = (kind(16, eps=None, dtype=torch.bfloat16) for kind in (modules.RMSNorm, torch.nn.RMSNorm))
    torch.testing.assert_close(ours(x), theirs(x))
