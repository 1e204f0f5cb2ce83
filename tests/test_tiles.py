"""Device code and launchers of the Triton rows under the interpreter, at their edges: ranges, padding, shared sums."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
CHECKS = [
    "scaled_products",
    "products_of_nothing",
    "padding_is_never_read",
    "rows_that_do_not_exist",
    "shared_sums",
    "vectors_with_gaps",
]


@pytest.mark.parametrize("name", CHECKS)
def test_under_the_interpreter(name):
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-W", "ignore", __file__, name], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def products(a, b, precision):
    """(a @ b with rows of a scaled, a @ b.T with a scaled as a whole) as the kernels multiply float32."""
    out = torch.empty(2, *a.shape)
    kernel[(1,)](a, b, b.T.contiguous(), out, len(a), precision)
    return out


def scaled_products():
    """Rows and tiles of any magnitude: errors stay a small part of |a| |b|, wherever float32 itself can hold both."""
    for exponents in ((0, 0), (-30, -30), (18, 18), (-37, 30), (37, -20)):
        a, b = (torch.randn(32, 32, dtype=torch.float64) for _ in range(2))
        a, b = (a * 10.0 ** exponents[0]).float(), (b * 10.0 ** exponents[1]).float()
        a[7] *= 1e-3
        scale = a.double().norm(dim=1, keepdim=True) * b.double().norm(dim=0).max()
        for precision, bound in (("fp16x3", 4e-7), ("fp16", 1.5e-3)):
            by_row, whole = (products(a, b, precision).double() - a.double() @ b.double()).abs()
            floor = 2.0**-126  # what float32 flushes
            assert (by_row <= bound * scale + floor).all(), (exponents, precision)
            assert (whole <= bound * scale.max() + floor).all(), (exponents, precision)
    # what is small beside the rest of its tile loses bits, but no more than 2^-39 of the largest
    a, b = torch.eye(32), torch.rand(32).add(1).diag()
    b[0, 0] = 2.0**30
    lost = (products(a, b, "fp16x3")[0] - b).abs().max()
    assert 0 < lost <= 2.0**-9


def products_of_nothing():
    """Zeros give zeros; what is not finite stays in its row, where rows have scales of their own."""
    zero, one = torch.zeros(32, 32), torch.ones(32, 32)
    for precision in ("fp16x3", "fp16"):
        for a, b in ((zero, zero), (zero, one), (one, zero)):
            assert (products(a, b, precision) == 0).all()
        for bad in (math.inf, math.nan):
            a = torch.ones(32, 32)
            a[3, 5] = bad
            by_row = products(a, one, precision)[0]
            assert not by_row[3].isfinite().any()
            assert by_row[torch.arange(32) != 3].eq(32).all()


def three_orders(backend, leaves, **options):
    """All outputs of attention and its two derivatives, the bias's among them."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    q, k, v, *bias = leaves
    out = adatom.attention(q, k, v, bias=bias[0] if bias else None, backend=backend, **options)
    torch.manual_seed(1)
    dout = torch.randn(out.shape).to(out.dtype).requires_grad_()
    grads = torch.autograd.grad(out, leaves, dout, create_graph=True)
    seconds = torch.autograd.grad(grads, [*leaves, dout], [torch.randn(g.shape).to(g.dtype) for g in grads])
    return [x.detach() for x in (out, *grads, *seconds)]


def agree(found, expected, tolerance=1e-4):
    for a, b in zip(found, expected, strict=True):
        assert a.isfinite().all()
        assert (a - b).norm() <= tolerance * b.norm() + 1e-6, (a - b).norm() / b.norm()


def padding_is_never_read():
    """Keys and values beyond kv_lens may be anything, NaN too."""
    leaves = [torch.randn(2, 2, n, 16) for n in (19, 37, 37)]
    bias = torch.randn(1, 2, 19, 37)
    for kv_lens in (torch.tensor([21, 0]), torch.tensor([37, 5])):
        for more in ([], [bias], [bias[:, :, :1]], [bias.expand(2, 2, 19, 37).clone()]):
            expected = three_orders("reference", [*leaves, *more], kv_lens=kv_lens)
            q, k, v = (x.clone() for x in leaves)
            beyond = torch.arange(37)[None, None, :, None] >= kv_lens[:, None, None, None]
            hidden = [q, k.masked_fill(beyond, math.nan), v.masked_fill(beyond, math.nan)]
            torch.manual_seed(0)
            found = three_orders("triton", [*hidden, *more], kv_lens=kv_lens)
            agree(found, expected)


def rows_that_do_not_exist():
    """A block of queries that is not whole, under a bias whose exponential float16 cannot hold."""
    leaves = [torch.randn(1, 2, n, 16) for n in (19, 37, 37)]
    bias = torch.randn(1, 2, 1, 37) + 14
    agree(three_orders("triton", [*leaves, bias]), three_orders("reference", [*leaves, bias]))
    half = [x.half() for x in (*leaves, bias)]
    expected = three_orders("reference", [x.float() for x in half])
    agree([x.float() for x in three_orders("triton", half)], expected, 1e-2)


def shared_sums():
    """The gradient of a bias that many share, its sum divided among one, two and three programs."""
    leaves = [torch.randn(3, 2, n, 16) for n in (9, 13, 13)]
    for shape, several in (((1, 2, 9, 13), (2, 3)), ((3, 1, 9, 13), (2,)), ((1, 1, 9, 13), (1, 4))):
        bias = torch.randn(shape)
        expected = three_orders("reference", [*leaves, bias])
        for parts in several:
            triton_call.Call.parts = lambda *_, parts=parts: parts
            agree(three_orders("triton", [*leaves, bias]), expected)


def vectors_with_gaps():
    """Sinks, lengths, weights and biases whose numbers do not follow each other in memory, or are one and the same."""
    q, k, v = (torch.randn(3, 2, 9, 16) for _ in range(3))
    packed, x = torch.randn(3, 20, 2, 16), torch.randn(5, 16)
    w = torch.randn(8, 16)

    def everything(sinks, kv_lens, cu_seqlens, weight, bias, bias_out):
        yield adatom.attention(q, k, v, sinks=sinks, kv_lens=kv_lens)
        yield adatom.attention_varlen(*packed, cu_seqlens, cu_seqlens, sinks=sinks)
        yield adatom.rms_norm(x, weight)
        yield adatom.layer_norm(x, weight, bias)
        for activation in (None, "gelu"):
            yield adatom.linear(x, w, bias_out, activation=activation)

    columns = [torch.randn(n, 2)[:, 1] for n in (2, 16, 16, 8)]
    lens, cu_seqlens = (torch.tensor(n)[:, 0] for n in ([[4, 8], [9, 8], [2, 8]], [[0, 9], [7, 9], [20, 9]]))
    same = [torch.randn(1).expand(n) for n in (2, 16, 16, 8)]
    for vectors in ((columns[0], lens, cu_seqlens, *columns[1:]), (same[0], lens[:1].expand(3), cu_seqlens, *same[1:])):
        assert not any(t.is_contiguous() for t in vectors)
        dense = [t.contiguous() for t in vectors]
        agree(everything(*vectors), everything(*dense))
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in (*vectors, *dense)]
        loss = sum(y.square().sum() for y in (*everything(*leaves[:6]), *everything(*leaves[6:])))
        loss.backward()
        agree((t.grad for t in leaves[:6] if t.requires_grad), (t.grad for t in leaves[6:] if t.requires_grad))


if __name__ == "__main__":
    import triton
    import triton.language as tl

    import adatom
    from adatom.ops.attention import triton_call
    from adatom.tiles.triton import dot

    @triton.jit
    def kernel(A, B, BT, Out, N: tl.constexpr, PRECISION: tl.constexpr):
        at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
        a = tl.load(A + at)
        tl.store(Out + at, dot(a, tl.load(B + at), None, PRECISION))
        tl.store(Out + N * N + at, dot(a, tl.load(BT + at), None, PRECISION, True))

    torch.manual_seed(0)
    torch.set_num_threads(1)
    globals()[sys.argv[1]]()
