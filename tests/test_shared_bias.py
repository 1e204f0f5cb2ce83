"""The backward under a learned bias that many (batch, head) share: what is launched when, and what memory it takes."""

from __future__ import annotations

import weakref

import pytest
import torch

import adatom
from adatom.bench.timing import peak_bytes
from adatom.device import Device, pretend
from adatom.ops.attention.api import inputs_of
from adatom.tiles.launch import observed

pytest.importorskip("triton.experimental.gluon")

from adatom.ops.attention import hopper_bwd, triton_bwd, triton_fwd  # noqa: E402
from adatom.ops.attention.triton_call import Call  # noqa: E402

H100 = Device("cuda", 90, 132, 232448)
BF16 = torch.bfloat16
FEW, MANY = (64, 4, 256, 32), (2, 16, 2048, 64)  # tiles of the bias, fewer and more than multiprocessors


def events(module, backward, shape, monkeypatch):
    """Names of the kernels launched, "gradient" where memory for one of q, k or v is asked for."""
    found, sums = [], []
    like, new = module.empty_like, getattr(module, "empty", None)

    def empty_like(x, *args):
        found.append("gradient" if x.dim() == 4 else "rows")
        return like(x, *args)

    def empty(size, *args):
        made = new(size, *args)
        if size[1:] == (128,):  # the float32 sum of dQ
            sums.append(weakref.ref(made))
        return made

    def observe(kernel, args, meta, spill):
        name = kernel.fn.__name__
        found.append(name)
        if name == "_sum_kernel":
            assert not any(made() is not None for made in sums)

    monkeypatch.setattr(module, "empty_like", empty_like)
    if new:
        monkeypatch.setattr(module, "empty", empty)
    q = torch.empty(shape, dtype=BF16, device="meta")
    bias = torch.empty(1, shape[1], shape[2], shape[2], dtype=BF16, device="meta")
    with pretend(H100):
        x, o, _ = inputs_of(q=q, k=q, v=q, bias=bias)
        with observed(observe):
            backward(x, o, q, torch.empty(shape[:3], device="meta"), q, None, True)
    return [event for event in found if event != "rows"]


def test_triton_sums_a_bias_in_parts_before_dk_and_dv_have_memory(monkeypatch):
    found = events(triton_bwd, triton_bwd.backward, FEW, monkeypatch)
    assert found == ["gradient", "_q_kernel", "_bias_kernel", "_parts_kernel", *["gradient"] * 2, "_kv_kernel"]


def test_hopper_sums_a_bias_before_gradients_have_memory_or_after_the_sum_of_dq(monkeypatch):
    for backward in (hopper_bwd.backward, hopper_bwd.backward_ordered):
        planned = ["gradient"] * 3
        found = events(hopper_bwd, backward, FEW, monkeypatch)
        assert found == [*planned, "_before_kernel", "_sum_kernel", "_parts_kernel", *["gradient"] * 3, "_bwd_kernel"]
        found = events(hopper_bwd, backward, MANY, monkeypatch)
        last = ["_bwd_kernel", "_behind_kernel", "_sum_kernel"]
        assert found == [*planned, "_before_kernel", *["gradient"] * 3, *last]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "hopper_ordered"])
@pytest.mark.parametrize("shape", [FEW, MANY])
def test_memory_is_that_of_results_and_rows(cuda, shape, backend):
    if backend == "hopper_ordered" and torch.cuda.get_device_capability(cuda)[0] != 9:
        pytest.skip("needs a Hopper GPU")
    q, k, v, dout = (torch.randn(shape, device=cuda, dtype=BF16) for _ in range(4))
    bias = torch.randn(1, shape[1], shape[2], shape[2], device=cuda, dtype=BF16)
    wanted = [t.requires_grad_() for t in (q, k, v, bias)]
    out, lse = adatom.attention(q, k, v, bias=bias, backend="triton", return_lse=True)
    x, o, _ = inputs_of(q=q.detach(), k=k.detach(), v=v.detach(), bias=bias.detach())
    backward = triton_bwd.backward if backend == "triton" else hopper_bwd.backward_ordered

    def step():
        backward(x, o, out.detach(), lse.detach(), dout, None, True)
        yield "backward"

    for _ in step():
        pass
    results = sum(t.numel() * t.element_size() for t in wanted)
    rows = 2 * lse.numel() * lse.element_size()
    assert peak_bytes(step, cuda) < results + rows + 2**20


def test_the_forward_takes_tall_tiles_where_they_need_fewer_turns_of_the_gpu():
    def rows(batch, heads, length, **mask):
        q = torch.empty(batch, heads, length, 32, dtype=BF16, device="meta")
        with pretend(H100):
            x, o, _ = inputs_of(q, q, q, **mask, bias=torch.empty(1, heads, length, length, dtype=BF16, device="meta"))
            return triton_fwd._tile(Call(x, o)).block_m

    assert rows(64, 4, 384) == rows(8, 16, 768) == rows(16, 8, 333) == 128  # 2, 2, 1 turns for 3, 3, 2
    assert rows(2, 16, 2048) == rows(512, 4, 512) == rows(4, 8, 200) == 64  # 2, 21, 1 for 2, 25, 1
    assert rows(64, 4, 384, causal=True) == rows(64, 4, 384, window=(9, None)) == 64  # not timed
