"""flash-attn's documented behaviour, through adatom.compat.flash_attn."""

import inspect

import pytest
import torch

from adatom.compat import flash_attn
from adatom.compat.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

# What follows the tensors in every function of flash-attn 2.8, in order, with defaults.
TAIL = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
CU = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
SIGNATURES = {
    "flash_attn_func": (("q", "k", "v"), TAIL),
    "flash_attn_kvpacked_func": (("q", "kv"), TAIL),
    "flash_attn_qkvpacked_func": (("qkv",), TAIL),
    "flash_attn_varlen_func": (("q", "k", "v", *CU), {**TAIL, "block_table": None}),
    "flash_attn_varlen_kvpacked_func": (("q", "kv", *CU), TAIL),
    "flash_attn_varlen_qkvpacked_func": (("qkv", "cu_seqlens", "max_seqlen"), TAIL),
    "flash_attn_with_kvcache": (("q", "k_cache", "v_cache"), {
        **dict.fromkeys(("k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad")),
        "block_table": None, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
        "rotary_interleaved": True, "alibi_slopes": None, "num_splits": 0, "return_softmax_lse": False,
    }),
}  # fmt: skip


def dense(q, k, v, scale=None, keep=None, softcap=0.0, alibi=None):
    """Attention on (batch, seqlen, heads, head_dim) by its definition. keep, alibi: broadcast to the scores."""
    repeat = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi is not None:
        scores = scores + alibi
    if keep is not None:
        scores = scores.masked_fill(~keep, -torch.inf)
    p = torch.softmax(scores, -1).nan_to_num(0.0)
    return torch.einsum("bhij,bjhd->bihd", p, v), torch.logsumexp(scores, -1)


def tensors(*shapes, seed=0, grad=False):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, dtype=torch.float64, generator=g).requires_grad_(grad) for s in shapes]


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    tensors, options = SIGNATURES[name]
    parameters = inspect.signature(getattr(flash_attn, name)).parameters
    assert list(parameters) == [*tensors, *options]
    assert {n: p.default for n, p in parameters.items() if p.default is not p.empty} == options


@pytest.mark.parametrize(
    "seqlen_q, seqlen_k, picture",
    [(2, 5, "11110 11111"), (5, 2, "00 00 00 10 11")],
)
def test_causal_mask_as_pictured(seqlen_q, seqlen_k, picture):
    """The masks drawn in flash-attn's documentation; a row of zeros gives a zero output."""
    keep = torch.tensor([[c == "1" for c in row] for row in picture.split()])
    q, k = tensors((1, seqlen_q, 2, 8), (1, seqlen_k, 2, 8))
    v = torch.eye(seqlen_k, dtype=torch.float64)[None, :, None].expand(1, seqlen_k, 2, seqlen_k)  # out is the weights
    out, lse, probs = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert ((out[0] > 0) == keep[:, None]).all()
    close(out[0].sum(-1), keep.any(-1).double()[:, None].expand(seqlen_q, 2))
    expected, expected_lse = dense(q, k, v, keep=keep)
    close(out, expected)
    close(lse, expected_lse)
    assert probs is None


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (2, 1), (0, 0), (-1, 1), (3, -1)])
def test_window(causal, window):
    """Query i sees keys i + seqlen_k - seqlen_q - left to i + seqlen_k - seqlen_q + right, inclusive."""
    seqlen_q, seqlen_k = 6, 9
    q, k, v = tensors((2, seqlen_q, 4, 8), (2, seqlen_k, 2, 8), (2, seqlen_k, 2, 8))
    i = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    j = torch.arange(seqlen_k)
    keep = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    left, right = window
    if left >= 0:
        keep &= j >= i - left
    if right >= 0:
        keep &= j <= i + right
    if causal:
        keep &= j <= i
    close(flash_attn_func(q, k, v, causal=causal, window_size=window), dense(q, k, v, keep=keep)[0])


def test_any_negative_window_is_unbounded():
    q, k, v = tensors((2, 5, 2, 8), (2, 7, 2, 8), (2, 7, 2, 8))
    close(flash_attn_func(q, k, v, window_size=(-5, 2)), flash_attn_func(q, k, v, window_size=(-1, 2)))
    close(flash_attn_func(q, k, v, window_size=(-7, -9)), flash_attn_func(q, k, v))
    close(flash_attn_func(q, k, v, window_size=(None, -9)), flash_attn_func(q, k, v))


def test_grouped_heads_are_consecutive():
    """With 6 query heads and 2 key heads, heads 0, 1, 2 use key head 0 and heads 3, 4, 5 key head 1."""
    q, k, v = tensors((2, 5, 6, 8), (2, 7, 2, 8), (2, 7, 2, 8))
    out = flash_attn_func(q, k, v)
    for head in range(6):
        kv = [x[:, :, head // 3 : head // 3 + 1] for x in (k, v)]
        close(out[:, :, head : head + 1], dense(q[:, :, head : head + 1], *kv)[0])


def test_options_in_order():
    """dropout_p, softmax_scale, causal, window_size, softcap, ... by position, as old code passes them."""
    q, k, v = tensors((2, 6, 2, 8), (2, 6, 2, 8), (2, 6, 2, 8))
    i, j = torch.arange(6)[:, None], torch.arange(6)
    out = flash_attn_func(q, k, v, 0.0, 0.3, True, (2, 0), 1.5, None, True, False)
    close(out, dense(q, k, v, 0.3, (j <= i) & (j >= i - 2), 1.5)[0])


@pytest.mark.parametrize("per_batch", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_alibi(per_batch, causal):
    q, k, v = tensors((2, 4, 3, 8), (2, 6, 3, 8), (2, 6, 3, 8))
    slopes = torch.rand((2, 3) if per_batch else (3,), generator=torch.Generator().manual_seed(1))
    i, j = torch.arange(4)[:, None] + 2, torch.arange(6)
    bias = -slopes.double().reshape(-1, 3, 1, 1) * (i - j).abs()
    out = flash_attn_func(q, k, v, alibi_slopes=slopes, causal=causal)
    close(out, dense(q, k, v, keep=(j <= i) if causal else None, alibi=bias)[0])


def test_alibi_compiles_for_any_length():
    q, k, v = tensors((2, 6, 3, 8), (2, 6, 3, 8), (2, 6, 3, 8))
    call = lambda *a: flash_attn_func(*a, alibi_slopes=torch.tensor([0.5, 0.25, 0.125]), causal=True)  # noqa: E731
    close(torch.compile(call, dynamic=True, fullgraph=True, backend="eager")(q, k, v), call(q, k, v))


def test_gradients_reach_the_packed_tensor():
    (qkv,) = tensors((2, 6, 3, 2, 8), grad=True)
    out = flash_attn_qkvpacked_func(qkv, causal=True)
    i, j = torch.arange(6)[:, None], torch.arange(6)
    expected, _ = dense(*qkv.unbind(2), keep=j <= i)
    close(out, expected)
    (dout,) = tensors(out.shape, seed=3)
    close(*(torch.autograd.grad(o, qkv, dout)[0] for o in (out, expected)))

    q, kv = tensors((2, 5, 4, 8), (2, 7, 2, 2, 8), grad=True)
    out = flash_attn_kvpacked_func(q, kv, softmax_scale=0.5)
    expected, _ = dense(q, *kv.unbind(2), scale=0.5)
    close(out, expected)
    (dout,) = tensors(out.shape, seed=3)
    for a, b in zip(torch.autograd.grad(out, (q, kv), dout), torch.autograd.grad(expected, (q, kv), dout)):
        close(a, b)


def test_views_are_not_copied():
    (qkv,) = tensors((2, 6, 3, 2, 8))
    out = flash_attn_qkvpacked_func(qkv)
    assert out.shape == (2, 6, 2, 8) and out.is_contiguous()


def test_varlen_is_each_sequence_alone():
    lens_q, lens_k = [3, 0, 5, 1], [4, 2, 5, 0]
    cu_q, cu_k = (torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()], dtype=torch.int32) for n in (lens_q, lens_k))
    q, k, v = tensors((9, 4, 8), (11, 2, 8), (11, 2, 8), grad=True)
    out, lse, probs = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 5, 5, 0.0, None, True, (2, -1), return_attn_probs=True
    )
    assert out.shape == q.shape and lse.shape == (4, 9) and probs is None
    expected = []
    for n in range(4):
        one = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        i, j = torch.arange(lens_q[n])[:, None] + lens_k[n] - lens_q[n], torch.arange(lens_k[n])
        expected.append(dense(q[None, one[0]], k[None, one[1]], v[None, one[1]], keep=(j <= i) & (j >= i - 2))[0][0])
    expected = torch.cat(expected)
    close(out, expected)
    (dout,) = tensors(out.shape, seed=3)
    got, want = (torch.autograd.grad(o, (q, k, v), dout) for o in (out, expected))
    for a, b in zip(got, want):
        close(a, b.nan_to_num(0.0))  # softmax over no keys at all: autograd of the formula gives NaN there


def test_varlen_packed_forms():
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    (qkv,) = tensors((9, 3, 2, 8))
    out = flash_attn_varlen_qkvpacked_func(qkv, cu, 5, causal=True)
    for a, b in ((0, 4), (4, 9)):
        close(out[None, a:b], flash_attn_qkvpacked_func(qkv[None, a:b], causal=True))
    close(out, flash_attn_varlen_kvpacked_func(qkv[:, 0], qkv[:, 1:], cu, cu, 5, 5, causal=True))


def test_deterministic_asks_for_a_deterministic_backward():
    q, k, v = tensors((1, 5, 2, 8), (1, 5, 2, 8), (1, 5, 2, 8))
    close(flash_attn_func(q, k, v, deterministic=True), flash_attn_func(q, k, v))


def test_refusals():
    q, k, v = tensors((1, 4, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8))
    cu = torch.tensor([0, 4], dtype=torch.int32)
    varlen = q[0], k[0], v[0], cu, cu
    with pytest.raises(NotImplementedError, match="dropout_p = 0.*dropout_p=0.1"):
        flash_attn_func(q, k, v, 0.1)
    with pytest.raises(NotImplementedError, match="dropout"):
        flash_attn_varlen_func(*varlen, 4, 4, dropout_p=0.1)
    with pytest.raises(NotImplementedError, match="block_table"):
        flash_attn_varlen_func(*varlen, 4, 4, block_table=torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(NotImplementedError, match="alibi_slopes"):
        flash_attn_varlen_func(*varlen, 4, 4, alibi_slopes=torch.ones(2))
    with pytest.raises(ValueError, match="alibi_slopes of shape.*on q's device.*on meta"):
        flash_attn_func(*(torch.randn(1, 4, 2, 8) for _ in range(3)), alibi_slopes=torch.ones(2, device="meta"))
    with pytest.raises(ValueError, match=r"max_seqlen_k of at least the longest sequence, 4; got max_seqlen=3"):
        flash_attn_varlen_func(*varlen, 4, 3)
    with pytest.raises(ValueError, match=r"alibi_slopes of shape \(2,\) or \(1, 2\).*\[3\]"):
        flash_attn_func(q, k, v, alibi_slopes=torch.ones(3))
    with pytest.raises(ValueError, match=r"\(batch, seqlen, 3, heads, head_dim\).*\[1, 4, 2, 8\]"):
        flash_attn_qkvpacked_func(q)
    with pytest.raises(ValueError, match=r"\(batch, seqlen_k, 2, kv_heads, head_dim\).*\[1, 4, 2, 8\]"):
        flash_attn_kvpacked_func(q, k)
    with pytest.raises(ValueError, match="4-D"):
        flash_attn_func(q[0], k[0], v[0])


def test_what_is_no_tensor_is_refused_in_words():
    q, k, v = tensors((4, 2, 8), (4, 2, 8), (4, 2, 8))
    cu = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="4-D q, k and v"):
        flash_attn_func(None, k[None], v[None])
    with pytest.raises(ValueError, match=r"float alibi_slopes of shape \(2,\) or \(1, 2\).*alibi_slopes=0.5"):
        flash_attn_func(q[None], k[None], v[None], alibi_slopes=0.5)
    with pytest.raises(ValueError, match="qkv of shape"):
        flash_attn_varlen_qkvpacked_func([q, k, v], cu, 4)
    with pytest.raises(TypeError, match=r"cu_seqlens_q as a dense tensor of int32 or int64; got cu_seqlens_q=\[0, 4\]"):
        flash_attn_varlen_func(q, k, v, [0, 4], [0, 4], 4, 4)
    close(flash_attn_varlen_func(q, k, v, cu, cu, None, None), flash_attn_varlen_func(q, k, v, cu, cu, 4, 4))


def turned(x, at, angles, interleaved):
    """x (batch, seqlen, heads, dim), its first features as complex numbers times exp(i angle) of positions `at`."""
    width = 2 * angles.shape[1]
    pairs = (-1, 2) if interleaved else (2, -1)
    z = x[..., :width].unflatten(-1, pairs).transpose(-1, -1 if interleaved else -2).contiguous()
    z = torch.view_as_complex(z) * torch.polar(torch.ones_like(angles), angles)[at][:, :, None]
    z = torch.view_as_real(z).transpose(-1, -1 if interleaved else -2).flatten(-2)
    return torch.cat((z, x[..., width:]), -1)


@pytest.mark.parametrize("rotary", [None, True, False])
@pytest.mark.parametrize(("causal", "window"), [(False, (-1, -1)), (True, (-1, -1)), (False, (2, 0)), (True, (3, -1))])
@pytest.mark.parametrize("lens", [3, (0, 5)])
def test_a_cache_is_filled_and_attended_to(rotary, causal, window, lens):
    q, k_cache, v_cache, k, v = tensors((2, 3, 4, 8), (2, 9, 2, 8), (2, 9, 2, 6), (2, 4, 2, 8), (2, 4, 2, 6))
    given = torch.tensor(lens, dtype=torch.int32) if isinstance(lens, tuple) else lens
    angles = torch.rand(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    tables = {} if rotary is None else {
        "rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": rotary
    }  # fmt: skip
    want_k, want_v = k_cache.clone(), v_cache.clone()
    out, lse = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=given, causal=causal,
                                       window_size=window, return_softmax_lse=True, **tables)  # fmt: skip
    for b, n in enumerate(lens if isinstance(lens, tuple) else (lens, lens)):
        at = torch.arange(n, n + 4)[None]
        moving = causal or window != (-1, -1)
        one, new = q[b : b + 1], k[b : b + 1]
        if rotary is not None:
            one = turned(one, at[:, :3] if moving else at[:, :1].expand(1, 3), angles, rotary)
            new = turned(new, at, angles, rotary)
        want_k[b, n : n + 4], want_v[b, n : n + 4] = new, v[b]
        i, j = torch.arange(3)[:, None] + n + 1, torch.arange(n + 4)
        keep = torch.ones(3, n + 4, dtype=torch.bool)
        keep &= (j <= i) if causal or window[1] == 0 else True
        keep &= (j >= i - window[0]) if window[0] >= 0 else True
        want = dense(one, want_k[b : b + 1, : n + 4], want_v[b : b + 1, : n + 4], keep=keep)
        close(out[b : b + 1], want[0])
        torch.testing.assert_close(lse[b : b + 1].double(), want[1], rtol=1e-6, atol=1e-6)
    close(k_cache, want_k)
    close(v_cache, want_v)


def test_a_cache_alone():
    """Without new keys: all of it, or as much as is there; scores of positions from the end of each."""
    q, k, v = tensors((2, 2, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8))
    slopes, lens = torch.rand(4, generator=torch.Generator().manual_seed(1)), torch.tensor([5, 0])
    close(flash_attn_with_kvcache(q, k, v), dense(q, k, v)[0])
    out = flash_attn_with_kvcache(q, k, v, None, None, None, None, lens, softmax_scale=0.3, softcap=1.5, causal=True,
                                  alibi_slopes=slopes, num_splits=3)  # fmt: skip
    i, j = torch.arange(2)[:, None] + 3, torch.arange(5)
    bias = -slopes.double().reshape(1, 4, 1, 1) * (i - j).abs()
    close(out[:1], dense(q[:1], k[:1, :5], v[:1, :5], 0.3, j <= i, 1.5, bias)[0])
    assert not out[1].any()


def test_what_a_cache_is_not():
    q, k, v = tensors((2, 1, 2, 8), (2, 4, 2, 8), (2, 4, 2, 8))
    new = torch.full((2, 2, 2, 8), 7.0, dtype=torch.float64)
    cos = torch.ones(4, 2)
    for options, error, says in (
        ({"cache_leftpad": torch.zeros(2)}, NotImplementedError, "no cache_leftpad"),
        ({"cache_batch_idx": torch.zeros(2)}, NotImplementedError, "no cache_batch_idx"),
        ({"block_table": torch.zeros(2, 1)}, NotImplementedError, "no block_table"),
        ({"k": new}, ValueError, "k and v, or neither"),
        ({"k": new, "v": new}, ValueError, "cache_seqlens, where k and v go"),
        ({"k": new, "v": new[:, :1], "cache_seqlens": 1}, ValueError, "like their caches, but for the length"),
        ({"k": new[:1], "v": new[:1], "cache_seqlens": 1}, ValueError, "of q's batch and like their caches"),
        ({"k": new.float(), "v": new.float(), "cache_seqlens": 1}, ValueError, "like their caches"),
        ({"k": new, "v": new, "cache_seqlens": 3}, ValueError, "room for the new keys"),
        ({"k": new, "v": new, "cache_seqlens": torch.tensor([-1, 0])}, ValueError, "room for the new keys"),
        ({"cache_seqlens": torch.tensor([5, 1])}, ValueError, "kv_lens between 0 and seqlen_k = 4"),
        ({"cache_seqlens": 1.5}, ValueError, "cache_seqlens as an integer"),
        ({"cache_seqlens": torch.ones(3).int()}, ValueError, "cache_seqlens as an integer"),
        ({"rotary_cos": cos, "rotary_sin": cos}, ValueError, "only with k and v"),
        ({"k": new, "v": new, "cache_seqlens": 1, "rotary_cos": cos}, ValueError, "rotary_sin of one shape"),
        ({"k": new, "v": new, "cache_seqlens": 1, "rotary_cos": torch.ones(4, 5), "rotary_sin": torch.ones(4, 5)},
         ValueError, "a rotary_dim up to head_dim"),
        ({"k": new, "v": new, "cache_seqlens": 2, "rotary_cos": cos[:3], "rotary_sin": cos[:3]},
         ValueError, "rotary_sin of all positions"),
        ({"k": new, "v": new, "cache_seqlens": 1, "softcap": -1.0}, ValueError, "finite softcap"),
        ({"k": new, "v": new, "cache_seqlens": 1, "window_size": (1.5, 0)}, TypeError, "window"),
    ):  # fmt: skip
        before = k.clone(), v.clone()
        with pytest.raises(error, match=says):
            flash_attn_with_kvcache(q, k, v, **options)
        assert torch.equal(k, before[0]) and torch.equal(v, before[1])
