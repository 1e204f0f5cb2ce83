"""dQ of the Hopper backward from dS, where that is stored as the gradient of a bias: the kernel behind in Triton's
interpreter, and which problems go that way."""

from __future__ import annotations

import pytest
import torch

from adatom.device import pretend
from adatom.ops.attention import limits
from adatom.ops.attention.api import inputs_of
from adatom.ops.attention.problem import problem

pytest.importorskip("triton.experimental.gluon")

from test_hopper import H100, run_interpreted  # noqa: E402

from adatom.ops.attention import hopper_bwd as backward  # noqa: E402

KERNEL = """
import itertools, torch
from adatom.ops.attention.api import inputs_of
from adatom.ops.attention.hopper_bwd_ends import dq_behind
from adatom.ops.attention.triton_call import Call

torch.manual_seed(0)
MASKS = (
    {}, {"causal": True}, {"window": (40, 30)}, {"window": (None, 20)}, {"window": (200, None), "causal": True},
    {"lens": [70, -5]}, {"lens": [-5, 900], "window": (100, None)}, {"lens": [200, 1], "causal": True},
    {"lens": [130, 260], "window": (100, 10)},
)
for (len_q, len_k), dim, mask in itertools.product(((300, 264), (130, 400), (1, 8)), (40,), MASKS):
    mask = dict(mask)
    lens = torch.tensor(mask.pop("lens")) if "lens" in mask else None  # of 64 bits, and not checked on a GPU
    q, k = torch.randn(2, 2, len_q, dim).half(), torch.randn(2, 1, len_k, dim).half()
    bias = torch.empty(2, 2, len_q, len_k).half()
    x, o, _ = inputs_of(q=q, k=k, v=k, bias=bias, kv_lens=None if lens is None else lens.clamp(0, len_k), **mask)
    x = x._replace(kv_lens=lens)
    call = Call(x, o)
    ends = torch.full((2,), len_k) if lens is None else lens.clamp(0, len_k)
    i, j = torch.arange(len_q)[:, None], torch.arange(len_k)
    at = i + ends[:, None, None] - len_q
    seen = (j < ends[:, None, None]).expand(2, len_q, len_k)
    if call.right >= 0:
        seen = seen & (j <= at + call.right)
    if call.left >= 0:
        seen = seen & (j >= at - call.left)
    ds = torch.randn(2, 2, len_q, len_k).half() * seen[:, None]
    given = ds.clone()  # what no query of a tile of 64 x 64 sees nobody wrote
    tiles = torch.nn.functional.max_pool2d(seen[:, None].float(), 64, ceil_mode=True)
    written = tiles.repeat_interleave(64, 2).repeat_interleave(64, 3)[..., :len_q, :len_k] > 0
    given[~written.expand_as(given)] = float("nan")
    want = ds.double() @ k.double() * o.scale
    if lens is not None:
        for b, n in enumerate(ends.tolist()):
            k[b, :, n:] = float("nan")
    dq = torch.full_like(q, float("nan"))
    launch = dq_behind(call, 64, dq)
    launch.meta["EARLY"] = False  # nothing to wait for, which the interpreter cannot
    launch(given, k, dq, x.kv_lens)
    assert torch.equal(given, ds), (len_q, len_k, mask)
    assert (dq.double() - want).abs().max() <= 2e-3 * want.abs().max() + 1e-6, (len_q, len_k, mask)
"""


def test_dq_from_ds_and_zeros_where_nothing_is_seen():
    """Tiles that no query sees come unwritten, keys beyond kv_lens as NaN: neither is in dQ, and dS is 0 there."""
    run_interpreted(KERNEL)


def launches(dim, length, ordered, batch=1, heads=8, wanted=True, bias_heads=None, dtype=torch.bfloat16, **options):
    q, bias = (torch.empty(batch, heads, length, n, dtype=torch.bfloat16, device="meta") for n in (dim, length))
    with pretend(H100):
        x, o, _ = inputs_of(q=q, k=q, v=q, bias=bias[:, :bias_heads].to(dtype), **options)
        return backward._launches(x, o, q, q, (q, q, q), False, wanted, ordered)


@pytest.mark.parametrize("ordered", [False, True])
def test_which_problems_multiply_dq_from_ds(ordered):
    """Without a mask to head_dim 64 where sums are slow; under one, and beyond, always."""
    for dim, length, options, stored in (
        (128, 4096, {}, True), (96, 304, {}, True), (64, 4096, {"heads": 16}, ordered),
        (64, 2000, {}, True), (64, 4096, {"heads": 2}, True),
        (32, 1024, {}, ordered), (32, 4096, {"heads": 16}, False), (32, 4096, {"heads": 16, "causal": True}, True),
        (64, 4096, {"window": (100, 100)}, True), (32, 512, {"causal": True}, False),  # whole heads
        (128, 4096, {"wanted": False}, False), (128, 4096, {"bias_heads": 1}, False),
        (128, 4096, {"softcap": 5.0}, False), (128, 4096, {"dtype": torch.float32}, False), (128, 1001, {}, False),
    ):  # fmt: skip
        made = launches(dim, length, ordered, **options)
        assert made.main.meta["DQ_BEHIND"] == stored, (dim, length, options)
        if stored:
            assert made.sums == 0 and not made.turns and made.behind.kernel.fn.__name__ == "_dq_kernel"
            unused = "ORDERED", "FIRST", "CLAIM", "UP", "CROSSED", "SHIFTED", "CUT"
            assert not any(made.main.meta[name] for name in unused)


def test_both_rows_are_the_same_where_ds_is_stored():
    for dim, length, options in ((128, 4096, {}), (64, 2304, {"causal": True}), (32, 904, {"causal": True})):
        any_order, in_order = (launches(dim, length, ordered, **options) for ordered in (False, True))
        assert any_order.main.meta == in_order.main.meta and any_order.main.scalars == in_order.main.scalars


def test_short_problems_and_few_tiles_are_served_where_ds_is_stored():
    for dim, heads, length, shared, served in (
        (64, 8, 256, False, True), (64, 7, 256, False, False), (64, 64, 256, True, False), (128, 16, 128, False, True),
        (32, 8, 1024, False, True), (32, 64, 640, False, True), (64, 16, 1024, True, False),
    ):  # fmt: skip
        q, bias = (torch.empty(1, heads, length, n, dtype=torch.bfloat16, device="meta") for n in (dim, length))
        with pretend(H100):
            x, o, _ = inputs_of(q=q, k=q, v=q, bias=bias[:, :1] if shared else bias)
            p = problem(x, o, bias_grad=True)
            assert [row(p) is None for row in (limits.hopper_bwd, limits.hopper_bwd_ordered)] == [served, served]


def test_dimensions_of_size_1_may_have_any_stride():
    k = torch.empty(3, 4 * 512 * 64 + 4, dtype=torch.bfloat16, device="meta")[:, :-4].view(3, 4, 512, 64)[:1]
    assert k.stride(0) % 8
    made = launches(64, 512, True, heads=4, causal=True)
    described = made.behind.describe(k, (128, 64))
    assert described.shape == [1, 4, 512, 64] and described.strides == [16, 32768, 64, 1]


@pytest.mark.parametrize("ordered", [False, True])
def test_nobody_shares_fewer_keys_in_order_where_nothing_is_summed(ordered):
    """Both rows are then one kernel."""
    q, k = (torch.empty(1, n, 4096, 64, dtype=torch.bfloat16, device="meta") for n in (32, 8))
    bias = q.new_empty(1, 32, 4096, 4096).requires_grad_()
    with pretend(H100):
        x, o, _ = inputs_of(q=q, k=k, v=k, causal=True, bias=bias)
        plan = backward._launches(x, o, q, q, (q, k, k), False, True, ordered)
    assert plan.main.meta["DQ_BEHIND"] and not plan.main.meta["ORDERED"] and plan.splits == 2
