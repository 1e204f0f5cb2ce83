"""First and second derivatives, forward mode, and their compositions, in float64 through the public functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, jvp, vjp

import adatom
from adatom.ops.attention import reference
from adatom.ops.attention.problem import Inputs, Options

F64 = torch.float64
BACKENDS = ("reference", "torch_chunked")


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=F64, requires_grad=True)


def qkv(
    batch: int = 2,
    heads: int = 2,
    kv_heads: int = 2,
    seqlen_q: int = 4,
    seqlen_k: int = 5,
    dim: int = 3,
    dim_v: int = 3,
) -> tuple[torch.Tensor, ...]:
    return (
        leaf(batch, heads, seqlen_q, dim),
        leaf(batch, kv_heads, seqlen_k, dim),
        leaf(batch, kv_heads, seqlen_k, dim_v),
    )


def holes(*shape: int) -> torch.Tensor:
    """A constant bias with -inf entries and one row that is -inf throughout."""
    bias = torch.randn(shape, dtype=F64).masked_fill(torch.rand(shape) < 0.3, -math.inf)
    bias[0, 0, 1] = -math.inf
    return bias


def dense(x: Inputs, o: Options) -> torch.Tensor:
    return reference.attention(x, o)[0]


# gradcheck and gradgradcheck ---------------------------------------------------------------------------------------

# name -> shapes of qkv(), shape of a bias with gradient, whether sinks, other options
CASES: dict[str, tuple[dict[str, int], tuple[int, ...] | None, bool, dict[str, Any]]] = {
    "plain": ({}, None, False, {}),
    "gqa, own value dim": ({"heads": 4, "kv_heads": 2, "dim_v": 2}, None, False, {"scale": 0.7}),
    "causal": ({"seqlen_q": 5}, None, False, {"causal": True}),
    "causal, longer keys": ({"seqlen_q": 3}, None, False, {"causal": True}),
    "causal, rows with nothing": ({"seqlen_q": 6, "seqlen_k": 3}, None, False, {"causal": True}),
    "window": ({}, None, False, {"window": (1, 1)}),
    "softcap": ({}, None, False, {"softcap": 1.2}),
    "sinks": ({}, None, True, {}),
    "kv_lens": ({"batch": 3}, None, False, {"kv_lens": torch.tensor([5, 0, 2])}),
    "bias full": ({}, (2, 2, 4, 5), False, {}),
    "bias shared by the batch": ({}, (1, 2, 4, 5), False, {}),
    "bias shared by the heads": ({}, (2, 1, 4, 5), False, {}),
    "bias of keys": ({}, (2, 1, 1, 5), False, {}),
    "bias of queries": ({}, (2, 2, 4, 1), False, {"softcap": 2.0}),
    "bias of heads": ({}, (2, 1, 1), True, {}),
    "everything": (
        {"heads": 4, "kv_heads": 2, "dim_v": 2},
        (1, 4, 4, 5),
        True,
        {"causal": True, "window": (3, 0), "softcap": 1.5, "kv_lens": torch.tensor([5, 3])},
    ),
}


def problem(name: str) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    """The case as a function of its differentiable tensors, returning (out, lse), and those tensors."""
    sizes, bias_shape, with_sinks, options = CASES[name]
    tensors = dict(zip("qkv", qkv(**sizes)))
    if bias_shape is not None:
        tensors["bias"] = leaf(*bias_shape)
    if with_sinks:
        tensors["sinks"] = leaf(sizes.get("heads", 2))

    def call(*args: torch.Tensor, **more: Any) -> Any:
        out, lse = adatom.attention(**dict(zip(tensors, args)), **options, **more, return_lse=True)
        return out, lse.masked_fill(lse == -math.inf, 0.0)  # finite differences cannot take -inf

    return call, tuple(tensors.values())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_first_and_second_derivatives(name: str, backend: str) -> None:
    """Of out and lse, by every input, in reverse and forward mode; the second along random directions."""
    f, tensors = problem(name)

    def call(*args: torch.Tensor) -> Any:
        return f(*args, backend=backend)

    assert gradcheck(call, tensors, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(call, tensors, check_fwd_over_rev=True, check_rev_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_every_entry_of_the_second_derivative(name: str) -> None:
    f, tensors = problem(name)
    assert gradgradcheck(f, tensors)


@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_bias_without_gradient(backend: str) -> None:
    bias, tensors = holes(1, 2, 4, 5), qkv()

    def call(*args: torch.Tensor) -> Any:
        return adatom.attention(*args, bias=bias, backend=backend)

    assert gradcheck(call, tensors, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(call, tensors, check_fwd_over_rev=True, check_rev_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "softcap": 1.5, "window": (2, None)}], ids=["plain", "options"]
)
def test_packed(options: dict[str, Any], backend: str) -> None:
    """attention_varlen, with a sequence without queries, one without keys, and sinks."""
    cu_q, cu_k = torch.tensor([0, 3, 3, 5, 7]), torch.tensor([0, 2, 4, 8, 8])
    tensors = leaf(7, 4, 3), leaf(8, 2, 3), leaf(8, 2, 2), leaf(4)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> Any:
        return adatom.attention_varlen(q, k, v, cu_q, cu_k, sinks=sinks, **options, return_lse=True, backend=backend)

    assert gradcheck(call, tensors, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(call, tensors, check_fwd_over_rev=True, check_rev_over_rev=True, fast_mode=True)


# Against autograd through dense attention --------------------------------------------------------------------------


def weighted(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A scalar with a curvature of its own."""
    return lambda *args: f(*args).sin().sum()


def functions() -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
    """adatom and dense attention as functions of (q, k, v, bias, sinks), and those."""
    x = (*(t.detach() for t in qkv(heads=4)), torch.randn(1, 4, 4, 5, dtype=F64), torch.randn(4, dtype=F64))
    o = Options(0.6, True, 3, -1, 1.3, "ieee")

    def ours(*args: torch.Tensor) -> torch.Tensor:
        q, k, v, bias, sinks = args
        return adatom.attention(q, k, v, bias=bias, sinks=sinks, scale=0.6, causal=True, window=(3, None), softcap=1.3)

    return ours, lambda *args: dense(Inputs(*args), o), x


ALL = (0, 1, 2, 3, 4)


def hessian_product(f: Callable[..., torch.Tensor], how: str, x: Any, t: Any) -> Any:
    """The Hessian of f at x times t, by one of three orders of the two modes."""
    if how == "forward over reverse":
        return jvp(grad(f, argnums=ALL), x, t)[1]
    if how == "reverse over forward":
        return grad(lambda *x: jvp(f, x, t)[1], argnums=ALL)(*x)
    return grad(lambda *x: sum((a * b).sum() for a, b in zip(grad(f, argnums=ALL)(*x), t)), argnums=ALL)(*x)


@pytest.mark.parametrize("how", ["forward over reverse", "reverse over forward", "reverse over reverse"])
def test_hessian_vector_product(how: str) -> None:
    ours, theirs, x = functions()
    t = tuple(torch.randn_like(a) for a in x)
    expected = hessian_product(weighted(theirs), "reverse over reverse", x, t)
    torch.testing.assert_close(hessian_product(weighted(ours), how, x, t), expected)


@pytest.mark.parametrize("moving", [(0,), (1,), (2,), (3,), (4,), ALL])
def test_forward_mode(moving: tuple[int, ...]) -> None:
    """torch.func.jvp along some inputs, against dense attention."""
    ours, theirs, x = functions()

    def along(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def g(*moved: torch.Tensor) -> torch.Tensor:
            args = list(x)
            for i, value in zip(moving, moved):
                args[i] = value
            return f(*args)

        return g

    at, t = tuple(x[i] for i in moving), tuple(torch.randn_like(x[i]) for i in moving)
    torch.testing.assert_close(jvp(along(ours), at, t), jvp(along(theirs), at, t))


@pytest.mark.parametrize("recording", [True, False])
def test_dual_tensors(recording: bool) -> None:
    """torch.autograd.forward_ad, with and without grad mode."""
    ours, theirs, x = functions()
    t = torch.randn_like(x[0])
    with torch.set_grad_enabled(recording), forward_ad.dual_level():
        got = forward_ad.unpack_dual(ours(forward_ad.make_dual(x[0], t), *x[1:])).tangent
        expected = forward_ad.unpack_dual(theirs(forward_ad.make_dual(x[0], t), *x[1:])).tangent
    torch.testing.assert_close(got, expected)


def test_vjp_of_lse() -> None:
    _, _, (q, k, v, bias, sinks) = functions()
    o = Options(0.5, False, -1, -1, 0.0, "ieee")

    def ours(*args: torch.Tensor) -> Any:
        q, k, v, bias, sinks = args
        return adatom.attention(q, k, v, bias=bias, sinks=sinks, scale=0.5, return_lse=True)

    (out, lse), pull = vjp(ours, q, k, v, bias, sinks)
    _, expected = vjp(lambda *args: reference.attention(Inputs(*args), o), q, k, v, bias, sinks)
    cotangents = torch.randn_like(out), torch.randn_like(lse)
    torch.testing.assert_close(pull(cotangents), expected(cotangents))


def test_lse_alone_is_differentiable_twice() -> None:
    q, k, v = qkv()
    assert gradgradcheck(lambda q, k: adatom.attention(q, k, v, return_lse=True)[1], (q, k))


@pytest.mark.parametrize("create_graph", [False, True])
def test_hessian_products_of_autograd(create_graph: bool) -> None:
    """hvp differentiates the second derivative by the cotangents of the first; all of torch.autograd.functional."""
    ours, theirs, x = functions()
    t = tuple(torch.randn_like(a) for a in x)
    for name in ("hvp", "vhp"):
        product = getattr(torch.autograd.functional, name)
        got, expected = (product(weighted(f), x, t, create_graph=create_graph) for f in (ours, theirs))
        torch.testing.assert_close(got, expected)


def test_hessian_products_through_two_layers() -> None:
    """The result of one attention is the query, the keys and the bias of another."""
    q, k, v = qkv(seqlen_q=5)
    b, t = leaf(1, 2, 5, 5), torch.randn_like(q)

    def f(attend: Callable[..., Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        def g(q: torch.Tensor) -> torch.Tensor:
            x = attend(q, k, v, b)
            return attend(x, x.sin(), v, b * x.mean()).square().sum()

        return g

    o = Options(3**-0.5, False, -1, -1, 0.0, "ieee")
    ours = f(lambda q, k, v, bias: adatom.attention(q, k, v, bias=bias))
    theirs = f(lambda q, k, v, bias: dense(Inputs(q, k, v, bias), o))
    got, expected = (torch.autograd.functional.hvp(g, q, t)[1] for g in (ours, theirs))
    torch.testing.assert_close(got, expected)


# What is refused ---------------------------------------------------------------------------------------------------


def test_third_derivative_raises() -> None:
    q, k, v = qkv()
    (first,) = torch.autograd.grad(adatom.attention(q, k, v).square().sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="third derivatives of attention are not implemented"):
        torch.autograd.grad(second.square().sum(), q)


def test_third_derivative_by_forward_mode_raises() -> None:
    ours, _, x = functions()
    t = tuple(torch.randn_like(a) for a in x)
    with pytest.raises(RuntimeError, match="third derivatives of attention are not implemented"):
        jvp(lambda *x: hessian_product(weighted(ours), "reverse over reverse", x, t), x, t)


def test_forward_over_forward_raises() -> None:
    ours, _, x = functions()
    t = tuple(torch.randn_like(a) for a in x)
    with pytest.raises(RuntimeError, match="forward mode over forward mode"):
        jvp(lambda *x: jvp(ours, x, t)[1], x, t)


# Training on forces ------------------------------------------------------------------------------------------------


def energy(positions: torch.Tensor, weights: list[torch.Tensor], attend: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Two attention layers over each atom's neighbours; the bias is the log of a cutoff that depends on positions."""
    n = positions.shape[0]
    eye = torch.eye(n, dtype=F64)
    vectors = positions[:, None] - positions + eye[..., None]
    distance = vectors.norm(dim=-1)
    cutoff = torch.where(eye.bool(), 1.0, (1 - (distance / 4).clamp(max=0.999)) ** 2)
    x = torch.cat((vectors, distance[..., None]), -1) @ weights[0]
    for weight in weights[1:]:
        q, k, v = (x @ weight).view(n, n, 3, 2, -1).permute(2, 0, 3, 1, 4)
        x = x + attend(q, k, v, cutoff.log()[:, None, None, :]).transpose(1, 2).reshape(n, n, -1)
    return (torch.tanh(x).sum(-1) * cutoff).sum()


def test_force_matching() -> None:
    """The gradients of a loss on forces -dE/dx, by the parameters, equal those through dense attention."""
    positions, target = torch.randn(6, 3, dtype=F64), torch.randn(6, 3, dtype=F64)
    start = [torch.randn(4, 8, dtype=F64) / 2, *(torch.randn(8, 24, dtype=F64) * 0.4 for _ in range(2))]
    o = Options(0.5, False, -1, -1, 0.0, "ieee")
    results = []
    for attend in (
        lambda q, k, v, bias: adatom.attention(q, k, v, bias=bias, scale=0.5),
        lambda q, k, v, bias: dense(Inputs(q, k, v, bias), o),
    ):
        weights = [w.clone().requires_grad_() for w in start]
        x = positions.clone().requires_grad_()
        forces = -torch.autograd.grad(energy(x, weights, attend), x, create_graph=True)[0]
        loss = (forces - target).square().mean()
        results.append((loss.detach(), torch.autograd.grad(loss, weights)))
    assert results[0][1][1].abs().max() > 1e-3
    torch.testing.assert_close(results[0], results[1])


# torch.compile -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recording", [True, False])
def test_compile_without_graph_breaks(recording: bool) -> None:
    """Values, gradients and strides of a compiled call equal the eager ones."""
    q, k, v = (t.detach().float().requires_grad_() for t in qkv(heads=4, kv_heads=2))
    bias, sinks = torch.randn(1, 4, 4, 5, requires_grad=True), torch.randn(4, requires_grad=True)

    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        out, lse = adatom.attention(q, k, v, bias=bias, sinks=sinks, causal=True, return_lse=True)
        return out * lse[..., None]

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    args = (q, k, v, bias, sinks)
    with torch.set_grad_enabled(recording):
        expected, got = f(*args), compiled(*args)
    torch.testing.assert_close(got, expected)
    assert got.stride() == expected.stride()
    if recording:
        torch.testing.assert_close(
            torch.autograd.grad(got.sin().sum(), args), torch.autograd.grad(expected.sin().sum(), args)
        )
    torch.compiler.reset()
