"""The reference and the chunked path against dense autograd, PyTorch's own attention, and each other."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import adatom
from adatom.ops.attention import reference, torch_chunked
from adatom.ops.attention.api import inputs_of
from adatom.ops.attention.cases import SMALL, Case, call, make
from adatom.ops.attention.problem import Inputs, Options, empty_out
from adatom.verify import Poisoned

F64 = torch.float64
BACKENDS = ("reference", "torch_chunked")
PLAIN = Options(0.25, False, -1, -1, 0.0, "ieee")


def arguments(case: Case, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """The case's keyword arguments, its float tensors as leaves with gradient (a bias with -inf too)."""
    given = make(case, "cpu")
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            given[name] = value.to(dtype or value.dtype).requires_grad_()
    return given


def is_leaf(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def leaves(given: dict[str, Any]) -> list[torch.Tensor]:
    return [value for value in given.values() if is_leaf(value)]


def normal(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Random numbers that do not depend on the dtype of `like`."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like.dtype)


def derivatives(out: torch.Tensor, lse: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """out, lse, and their first and second derivatives by `tensors`, along fixed directions."""
    lse = lse.masked_fill(lse == -math.inf, 0.0)
    first = torch.autograd.grad(
        (out, lse), tensors, (normal(out, 1), normal(lse, 2)), create_graph=True, materialize_grads=True
    )
    product = sum((g * normal(g, 3 + i)).sum() for i, g in enumerate(first))
    second = torch.autograd.grad(product, tensors, materialize_grads=True)
    return [out.detach(), lse.detach(), *(g.detach() for g in first), *second]


def ours(case: Case, given: dict[str, Any], backend: str) -> list[torch.Tensor]:
    return derivatives(*call(case)(**given, return_lse=True, backend=backend), leaves(given))


def dense(given: dict[str, Any]) -> list[torch.Tensor]:
    x, o, _ = inputs_of(**given)
    return derivatives(*reference.attention(x, o), leaves(given))


def cut(monkeypatch: pytest.MonkeyPatch, tile: int, rows: int) -> None:
    """Make the chunked path cut small problems too, and keep them from PyTorch's own kernel."""
    monkeypatch.setattr(torch_chunked, "TILE", {"cpu": tile})
    monkeypatch.setattr(torch_chunked, "ROWS", rows)
    monkeypatch.setattr(torch_chunked, "MIN_ROWS", 1)
    monkeypatch.setattr(torch_chunked, "_plain", lambda x, o: False)


class Calls(TorchDispatchMode):
    """Notes the name of each operation, and how many elements its first result has."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, (tuple, list)) else result
        self.made.append((func.overloadpacket.__name__, first.numel() if isinstance(first, torch.Tensor) else 0))
        return result


# Against dense autograd --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_float64_is_exact(case: Case, backend: str) -> None:
    """Every option in float64: values, first and second derivatives equal dense autograd's; every buffer is written."""
    given = arguments(case, F64)
    with Poisoned():
        got = ours(case, given, backend)
    torch.testing.assert_close(got, dense(given), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [c for c in SMALL if c.dtype != F64], ids=lambda c: c.name)
def test_errors_of_its_own_dtype(case: Case, backend: str) -> None:
    """In the case's dtype: the error is at most twice dense PyTorch's in that dtype, plus a few roundings."""
    given = arguments(case)
    judge = dense({k: v.detach().to(F64).requires_grad_() if is_leaf(v) else v for k, v in given.items()})
    roundings = 32 if case.dtype == torch.float32 else 2  # in float32 both err by rounding alone: the ratio is chance
    for got, same_precision, exact in zip(ours(case, given, backend), dense(given), judge, strict=True):
        if got.numel():
            floor = roundings * torch.finfo(case.dtype).eps * exact.abs().max().clamp(min=0.1)
            assert float((got - exact).abs().max()) <= float(2 * (same_precision - exact).abs().max() + floor)


MANY_OPTIONS = [c for c in SMALL if sum((bool(c.bias), c.causal, c.window is not None, c.kv_lens, c.varlen)) > 1]


@pytest.mark.parametrize(
    ("case", "tile", "rows"),
    [(c, 64, 3) for c in SMALL] + [(c, tile, rows) for c in MANY_OPTIONS for tile, rows in ((1, 1), (600, 8))],
    ids=lambda p: getattr(p, "name", p),
)
def test_tile_boundaries(case: Case, tile: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of a row, of a few rows that do not divide the length, and over several heads and batches."""
    cut(monkeypatch, tile, rows)
    given = arguments(case, F64)
    with Poisoned():
        got = ours(case, given, "torch_chunked")
    torch.testing.assert_close(got, ours(case, given, "reference"), rtol=1e-9, atol=1e-9)


# Against PyTorch's own attention -----------------------------------------------------------------------------------


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("masked", ["no", "causal", "bool", "bool of keys", "float"])
def test_as_scaled_dot_product_attention(masked: str, kv_heads: int, backend: str, dtype: torch.dtype) -> None:
    """Values and gradients, where PyTorch's own kernel serves and where it does not."""
    q, k, v = (torch.randn(2, h, 50, 16, dtype=dtype, requires_grad=True) for h in (4, kv_heads, kv_heads))
    shape = (2, 1, 1, 50) if masked == "bool of keys" else (2, 1, 50, 50)
    mask = torch.rand(shape) < 0.7 if masked.startswith("bool") else torch.randn(shape, dtype=dtype)
    mask[..., 0] = True if mask.dtype == torch.bool else 0.5  # a row with nothing is NaN in some versions of PyTorch
    if masked in ("no", "causal"):
        out = adatom.attention(q, k, v, causal=masked == "causal", backend=backend)
        expected = sdpa(q, k, v, is_causal=masked == "causal")
    else:
        out, expected = adatom.attention(q, k, v, bias=mask, backend=backend), sdpa(q, k, v, attn_mask=mask)
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(expected, (q, k, v), dout)
    )


@pytest.mark.parametrize("scale", [-0.5, 0.0, 1e-60])
def test_a_causal_mask_under_a_scale_that_is_not_positive(scale: float) -> None:
    """PyTorch's own kernel, which scales after it masks, gives NaN."""
    q, k, v = (torch.randn(2, 2, 9, 8, requires_grad=True) for _ in range(3))
    out, expected = (adatom.attention(q, k, v, causal=True, scale=scale, backend=b) for b in (None, "reference"))
    torch.testing.assert_close(out, expected)
    got, want = (torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (out, expected))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("heads_inside", [True, False])
@pytest.mark.parametrize(
    ("causal", "bias_shape"),
    [(False, None), (True, None), *((False, s) for s in ((2, 4, 37, 37), (2, 1, 37, 37), (4, 1, 37), (37,)))],
)
def test_handing_over_changes_nothing(
    causal: bool,
    bias_shape: tuple[int, ...] | None,
    heads_inside: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plain calls handed to PyTorch's kernel give what the tiles give: lse, gradients and strides included."""
    q, k, v = (torch.randn(2, 37, h, 16).to(dtype).transpose(1, 2) for h in (4, 2, 2))
    if not heads_inside:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    for x in (q, k, v):
        x.requires_grad_()
    bias = None if bias_shape is None else torch.randn(bias_shape).to(dtype)
    if bias is not None and bias.dim() == 4:
        bias[1, -1, 5] = -math.inf
    given: dict[str, Any] = {"bias": bias, "causal": causal, "return_lse": True, "backend": "torch_chunked"}

    def run() -> list[torch.Tensor]:
        out, lse = adatom.attention(q, k, v, **given)
        return [out, lse, *torch.autograd.grad(out, (q, k, v), normal(out, 1))]

    assert torch_chunked._plain(*inputs_of(q, k, v, bias=bias, causal=causal)[:2])
    handed = run()
    monkeypatch.setattr(torch_chunked, "_plain", lambda x, o: False)
    tiled = run()
    tolerance = 4 * torch.finfo(dtype).eps
    for a, b in zip(handed, tiled, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=max(tolerance, 1e-4 if a.dtype != dtype else 0) * 4)
        assert a.stride() == b.stride()


@pytest.mark.parametrize("bias_shape", [None, (2, 4, 37, 37), (1, 1, 37, 37)])
@pytest.mark.parametrize("heads_inside", [True, False])
def test_handing_over_copies_nothing(heads_inside: bool, bias_shape: tuple[int, ...] | None) -> None:
    """Neither operands nor results as large as they are copied, whichever of the usual layouts they have."""
    x = [torch.randn(2, 37, 4, 16).transpose(1, 2) for _ in range(4)]
    q, k, v, dout = x if heads_inside else [t.contiguous() for t in x]
    given = Inputs(q, k, v, None if bias_shape is None else torch.randn(bias_shape))
    with Calls() as calls:
        out, lse = torch_chunked.forward(given, PLAIN)
        torch_chunked.backward(given, PLAIN, out, lse, dout, None, False)
    copied = [size for name, size in calls.made if name in ("copy_", "clone", "_to_copy") and size >= q.numel()]
    assert [name for name, _ in calls.made if "flash" in name] and not copied


# Rows with nothing, empty sizes, padding, strides ------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias_kind", ["float", "bool"])
def test_fully_masked_rows(bias_kind: str, backend: str) -> None:
    """They give 0, lse -inf, and zero derivatives of both orders; no NaN anywhere."""
    q, k, v = (torch.randn(1, 2, 6, 8, requires_grad=True) for _ in range(3))
    bias = torch.zeros(1, 1, 6, 6)
    bias[..., 2, :] = -math.inf
    given = bias.requires_grad_() if bias_kind == "float" else bias == 0
    out, lse = adatom.attention(q, k, v, bias=given, return_lse=True, backend=backend)
    assert bool((out[:, :, 2] == 0).all()) and bool((lse[:, :, 2] == -math.inf).all())
    tensors = [t for t in (q, k, v, given) if t.requires_grad]
    first = torch.autograd.grad((out, lse), tensors, (torch.randn_like(out), torch.randn_like(lse)), create_graph=True)
    second = torch.autograd.grad(first, tensors, [torch.randn_like(g) for g in first])
    assert all(bool(g.isfinite().all()) for g in (*first, *second))
    assert all(bool((g[0][:, :, 2] == 0).all()) and bool((g[0] != 0).any()) for g in (first, second))
    if bias_kind == "float":
        assert bool((first[3][..., 2, :] == 0).all()) and bool((second[3][..., 2, :] == 0).all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(1, 1, 6, 6), (2, 1, 6, 6), (1, 2, 1, 6), (1, 1, 6, 1)])
def test_rows_masked_by_what_a_causal_mask_leaves(shape: tuple[int, ...], backend: str) -> None:
    """A bias of -inf over the first keys: the queries before the others see nothing."""
    q, k, v = (torch.randn(2, 2, 6, 8) for _ in range(3))
    bias = torch.zeros(shape)
    bias[..., :3] = -math.inf
    if shape[3] == 1:
        bias[:, :, 3:] = 0.0
    out, lse = adatom.attention(q, k, v, bias=bias, causal=True, return_lse=True, backend=backend)
    assert bool((out[:, :, :3] == 0).all()) and bool((lse[:, :, :3] == -math.inf).all())
    assert bool((out[:, :, 3:] != 0).all()) and bool(lse[:, :, 3:].isfinite().all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k"),
    [(0, 2, 2, 3, 4), (2, 0, 0, 3, 4), (2, 0, 2, 3, 4), (2, 2, 1, 0, 4), (2, 2, 1, 3, 0), (2, 2, 2, 0, 0)],
)
def test_empty(batch: int, heads: int, kv_heads: int, seqlen_q: int, seqlen_k: int, backend: str) -> None:
    """No batch, heads, queries or keys: zeros, and lse is the sink or -inf."""
    q = torch.randn(batch, heads, seqlen_q, 8, requires_grad=True)
    k, v = (torch.randn(batch, kv_heads, seqlen_k, 8, requires_grad=True) for _ in range(2))
    bias, sinks = torch.randn(1, 1, 1, seqlen_k, requires_grad=True), torch.randn(heads, requires_grad=True)
    for extra in ({}, {"bias": bias, "causal": True}, {"sinks": sinks, "window": (1, 1)}):
        with Poisoned():
            out, lse = adatom.attention(q, k, v, **extra, return_lse=True, backend=backend)
            tensors = [q, k, v, *(t for t in extra.values() if isinstance(t, torch.Tensor))]
            dlse = torch.ones_like(lse)
            first = torch.autograd.grad((out, lse), tensors, (torch.ones_like(out), dlse), create_graph=True)
            second = torch.autograd.grad(first, tensors, [torch.ones_like(g) for g in first])
        assert bool((out == 0).all())
        if seqlen_k == 0:
            nothing = sinks[:, None].expand_as(lse) if "sinks" in extra else torch.full_like(lse, -math.inf)
            torch.testing.assert_close(lse, nothing)
        for i, (g, h) in enumerate(zip(first, second)):
            whole = dlse.sum((0, 2)) if i == 3 and "sinks" in extra else torch.zeros_like(g)
            torch.testing.assert_close((g, h), (whole, torch.zeros_like(h)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_sequences(backend: str) -> None:
    """A packed batch of no sequences."""
    q, k, v = (torch.randn(0, 2, 8, requires_grad=True) for _ in range(3))
    cu = torch.zeros(1, dtype=torch.int32)
    out, lse = adatom.attention_varlen(q, k, v, cu, cu, return_lse=True, backend=backend)
    assert out.shape == (0, 2, 8) and lse.shape == (2, 0)
    assert [g.shape for g in torch.autograd.grad(out.sum(), (q, k, v))] == [(0, 2, 8)] * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_is_never_read(backend: str) -> None:
    """NaN stored beyond kv_lens reaches nothing, and gets zero gradients."""
    q, k, v = (torch.randn(2, 2, 6, 8) for _ in range(3))
    lens = torch.tensor([4, 1])
    x = Inputs(q, k.clone(), v.clone(), kv_lens=lens)
    for t in (x.k, x.v):
        t[0, :, 4:] = math.nan
        t[1, :, 1:] = math.nan
    module = {"reference": reference, "torch_chunked": torch_chunked}[backend]
    out, lse = module.forward(x, PLAIN)
    grads = module.backward(x, PLAIN, out, lse, torch.randn_like(out), None, False)[:3]
    ones = torch.ones_like(q)
    second = module.backward_backward(x, PLAIN, out, lse, ones, None, ones, ones, ones, None, None, False)
    tangents = module.jvp(x, PLAIN, out, lse, ones, ones, ones, None, None)
    clean = module.forward(Inputs(q[1:], k[1:, :, :1], v[1:, :, :1]), PLAIN)
    torch.testing.assert_close((out[1:], lse[1:]), clean)
    assert all(bool(t.isfinite().all()) for t in (*grads, *second[:3], *second[5:], *tangents))
    assert all(bool((t[0, :, 4:] == 0).all()) for t in (*grads[1:], *second[1:3]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides(backend: str) -> None:
    """Transposed, sliced, expanded and last-dimension-strided inputs give what their contiguous copies give."""
    q = torch.randn(2, 9, 4, 8).transpose(1, 2)
    k = torch.randn(2, 2, 20, 8)[:, :, ::2]
    v = torch.randn(2, 2, 8, 10).mT
    bias = torch.randn(2, 1, 9, 1).expand(2, 4, 9, 10)
    tensors = [t.requires_grad_() for t in (q, k, v, bias)]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
        out, lse = adatom.attention(q, k, v, bias=bias, return_lse=True, backend=backend)
        return derivatives(out, lse, [q, k, v, bias])

    torch.testing.assert_close(run(*tensors), run(*(t.detach().contiguous().requires_grad_() for t in tensors)))


def test_rows_that_overlap() -> None:
    """A kernel writes whole rows: what it makes in the likeness of windows of one sequence must have some."""
    windows = torch.randn(2, 3, 20).unfold(-1, 16, 1)  # 5 rows of 16
    assert torch.empty_like(windows).stride(-1) != 1
    x, _, _ = inputs_of(windows, windows, windows)
    assert empty_out(x.q, x.v).stride(-1) == 1
    assert torch.equal(x.k, windows)
    got = adatom.attention(windows, windows, windows)
    torch.testing.assert_close(got, adatom.attention(*[windows.contiguous()] * 3))


# Memory ------------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Notes the most elements any operation returns in storage of its own."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, torch.Tensor):
                self.elements = max(self.elements, t.untyped_storage().nbytes() // max(t.element_size(), 1))
        return result


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"softcap": 2.0, "window": (10, 0)}, {"kv_lens": True, "sinks": True}], ids=str
)
def test_memory_is_linear(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """No pass makes a tensor of seqlen x seqlen elements, nor any that grows with its square."""
    cut(monkeypatch, 1 << 10, 8)
    most = []
    for n in (64, 128):
        x = Inputs(*(torch.randn(1, 2, n, 4) for _ in range(3)))
        if options.get("kv_lens"):
            x = x._replace(kv_lens=torch.tensor([n - 3]), sinks=torch.randn(2))
        left, right = options.get("window", (-1, -1))
        o = Options(0.3, options.get("causal", False), left, right, options.get("softcap", 0.0), "ieee")
        with Largest() as largest:
            out, lse = torch_chunked.forward(x, o)
            torch_chunked.backward(x, o, out, lse, out, lse, False)
            torch_chunked.backward_backward(x, o, out, lse, out, lse, x.q, x.k, x.v, None, x.sinks, False)
            torch_chunked.jvp(x, o, out, lse, x.q, x.k, x.v, None, x.sinks)
        most.append(largest.elements)
    assert most[0] <= 1 << 11 and most[1] <= 2 * most[0]  # 4096 and 16384 would be the squares


def test_memory_with_a_bias_is_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias shared by batch and heads gets its gradient without an expanded copy."""
    cut(monkeypatch, 1 << 10, 8)
    n = 64
    q, k, v = (torch.randn(2, 4, n, 4) for _ in range(3))
    x = Inputs(q, k, v, bias=torch.randn(1, 1, n, n))
    with Largest() as largest:
        out, lse = torch_chunked.forward(x, PLAIN)
        torch_chunked.backward(x, PLAIN, out, lse, out, None, True)
        torch_chunked.backward_backward(x, PLAIN, out, lse, out, None, q, k, v, x.bias, None, True)
    assert largest.elements == n * n


def test_masked_keys_are_skipped() -> None:
    """Causal and window blocks compute only keys that some row may see."""
    x = Inputs(*(torch.empty(1, 1, 64, 8) for _ in range(3)))
    part = torch_chunked._Part(x, PLAIN._replace(causal=True), slice(0, 1), slice(0, 1), None)
    assert [part.reach(slice(i, i + 16)) for i in (0, 48)] == [slice(0, 16), slice(0, 64)]
    part = torch_chunked._Part(x, PLAIN._replace(window_left=4, window_right=2), slice(0, 1), slice(0, 1), None)
    assert part.reach(slice(16, 32)) == slice(12, 34)


@pytest.mark.parametrize("tile", torch_chunked.TILE.values())
@pytest.mark.parametrize("left", [31, 255, 1023])
def test_a_window_costs_little_more_than_it_shows(left: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a tile hold more scores than it may, be it as large as a GPU's."""
    monkeypatch.setitem(torch_chunked.TILE, "cpu", tile)
    q = torch.empty(2, 4, 4096, 8)
    x, o, _ = inputs_of(q, q, q, causal=True, window=(left, 0))
    for part, blocks in torch_chunked._walk(x, o):
        scores = [(i.stop - i.start) * (j.stop - j.start) for i, j in blocks]
        assert sum(scores) <= 4096 * (left + 1 + torch_chunked.ROWS)
        assert part.n * max(scores) <= tile


# On a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_on_cuda(case: Case, cuda: torch.device) -> None:
    """The chunked path computes on a GPU what it computes on the CPU."""
    given = arguments(case, F64)
    there = {
        k: v.detach().to(cuda).requires_grad_(v.requires_grad) if torch.is_tensor(v) else v for k, v in given.items()
    }
    got = call(case)(**there, return_lse=True, backend="torch_chunked")
    expected = call(case)(**given, return_lse=True, backend="torch_chunked")
    torch.testing.assert_close([t.cpu() for t in got], list(expected))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 5.0}, {"window": (3, 3)}])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_results_may_be_changed_in_place(options, kv_heads):
    """They are no views to autograd; the backward needs out as it was, and says so, as SDPA's does."""
    q, k, v = (torch.randn(2, heads, 20, 16, requires_grad=True) for heads in (4, kv_heads, kv_heads))
    out, lse = adatom.attention(q, k, v, return_lse=True, **options)
    lse += 1.0
    out += q
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_lengths_of_keys_that_nobody_can_check_are_clamped():
    """Under vmap and in a compiled region, as on a GPU."""
    q, lens, clamped = torch.randn(2, 4, 6, 8), torch.tensor([7, -3]), torch.tensor([6, 0])
    expected = adatom.attention(q, q, q, kv_lens=clamped)

    def one(q, lens):
        return adatom.attention(q[None], q[None], q[None], kv_lens=lens[None])[0]

    torch.testing.assert_close(torch.func.vmap(one)(q, lens), expected)
    compiled = torch.compile(lambda q, lens: adatom.attention(q, q, q, kv_lens=lens), backend="aot_eager")
    torch.testing.assert_close(compiled(q, lens), expected)


FAR = """
import torch, adatom
torch.manual_seed(0)
q, k, v = (torch.randn(1, 1, 16, 16) for _ in range(3))
for far in (1.1e6, -4e6, 8e6):
    grads = []
    for backend in ("reference", "triton"):
        given, bias = v.clone().requires_grad_(), torch.full((1, 1, 16, 16), far, requires_grad=True)
        out = adatom.attention(q, k, given, bias=bias, backend=backend)
        grads.append(torch.autograd.grad(out.square().sum(), (given, bias)))
    for expected, found in zip(*grads):
        assert 0.7 < (found.norm() / expected.norm()).item() < 1.4, far
"""


def test_a_bias_far_from_0_leaves_gradients_their_size(interpreted):
    """To 2^23, where float32 rounds scores and lse by up to a half."""
    interpreted(FAR)
