"""How the Hopper forward is tiled and balanced: what its launcher works out on the host, for an invented H100."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from adatom.device import Device, pretend
from adatom.ops.attention.api import inputs_of

pytest.importorskip("triton.experimental.gluon")

from adatom.ops.attention import hopper_fwd  # noqa: E402
from adatom.ops.attention.triton_call import Call  # noqa: E402
from adatom.tiles import hopper  # noqa: E402

H100 = Device("cuda", 90, 132, 232448)


def call_of(dims=(64, 64), lengths=(1024, 1024), batch=8, heads=8, **options) -> Call:
    """What the launcher sees of a call; its tensors have no memory."""
    q, k, v = (
        torch.empty(batch, heads, n, d, dtype=torch.bfloat16, device="meta")
        for n, d in zip((*lengths, lengths[1]), (dims[0], *dims))
    )
    with pretend(H100):
        x, o, _ = inputs_of(q=q, k=k, v=v, **options)
        return Call(x, o)


@pytest.mark.parametrize("dtype", [None, torch.bool, torch.bfloat16, torch.float32])
def test_buffers_fit_in_shared_memory(dtype):
    """For every head_dim, bias and length there is a tile with at least one buffer of each kind."""
    for dim, dim_v, length in itertools.product((16, 32, 64, 128, 256), (16, 64, 128, 256), (256, 2048, 20000)):
        options = {} if dtype is None else {"bias": torch.empty(1, 1, length, length, dtype=dtype, device="meta")}
        for causal in (False, True):
            call = call_of((dim, dim_v), (length, length), causal=causal, **options)
            config = hopper_fwd._pick(call, (dim, dim_v))
            stages = hopper_fwd._stages(config, call, (dim, dim_v))
            if not stages[0]:
                config = config._replace(block_n=config.block_n // 2)
                stages = hopper_fwd._stages(config, call, (dim, dim_v))
            assert min(stages) >= 1, (dim, dim_v, length, causal, dtype)


@pytest.mark.parametrize("lengths", [(512, 512), (777, 1000), (2048, 2048), (3000, 500), (4096, 4096)])
def test_the_model_of_the_balance(lengths):
    """`_imbalance` is what walking through the tiles one by one gives."""
    call = call_of((128, 128), lengths, batch=4, heads=7, causal=True)
    config = hopper_fwd._pick(call, (128, 128))
    rows, n_blocks = 128, math.ceil(lengths[0] / 128)
    for group in (1, 3, 28):
        tiles = []
        for first in range(0, 28, group):
            for block in reversed(range(n_blocks)):
                end = min(lengths[1], (block + 1) * rows + lengths[1] - lengths[0])
                tiles += [max(math.ceil(end / config.block_n), 1) + 1] * min(group, 28 - first)
        load = [0] * H100.sms
        for t, cost in enumerate(tiles):
            turn, place = divmod(t, H100.sms)
            load[H100.sms - 1 - place if turn % 2 else place] += cost
        expected = max(load) / (sum(load) / H100.sms)
        assert abs(hopper_fwd._imbalance(group, call, config) - expected) < 1e-9


def test_persistent_programs_are_balanced():
    for length in (512, 1000, 1024, 1536, 2048, 3000, 4096, 8192, 16384):
        for dim in (64, 128, 256):
            call = call_of((dim, dim), (length, length), batch=max(1, 32768 // length), heads=2048 // dim, causal=True)
            config, group = hopper_fwd._balance(hopper_fwd._pick(call, (dim, dim)), call)
            assert group >= 1
            assert not config.persistent or hopper_fwd._imbalance(group, call, config) <= 1.1


def test_descriptors():
    """A size-1 dimension may have any stride; the box is one tile of one (batch, head)."""
    x = torch.empty(512 * 40, dtype=torch.bfloat16).as_strided((1, 1, 512, 40), (1, 3, 40, 1))
    made = hopper.descriptor(x, (64, 64))
    assert made.block_shape == [1, 1, 64, 64]
    assert made.shape == [1, 1, 512, 40]
    assert all(stride % 8 == 0 for stride in made.strides[:3])
    assert made.strides[2:] == [40, 1]
    expanded = torch.empty(1, 4, 128, 128).expand(3, 4, 128, 128)
    assert hopper.descriptor(expanded, (64, 128)).shape == [1, 4, 128, 128]
