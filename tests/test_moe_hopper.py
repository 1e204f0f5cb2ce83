"""moe's Hopper kernels: what can be worked out on the host, for an invented H100."""

from __future__ import annotations

import pytest
import torch

from adatom.compile import DEVICES
from adatom.device import pretend
from adatom.ops.moe import limits
from adatom.ops.moe.problem import Inputs, Options, problem
from adatom.registry import choose, load
from adatom.tiles.launch import observed

pytest.importorskip("triton.experimental.gluon")

from adatom.ops.moe import hopper_one, hopper_outer, hopper_products, hopper_wide  # noqa: E402

H100 = DEVICES[90]


def inputs(tokens: int, hidden: int = 2048, wide: int = 768, experts: int = 128, top_k: int = 8) -> Inputs:
    """Tensors without memory."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    return Inputs(
        empty(tokens, hidden), empty(tokens, top_k, dtype=torch.float32), empty(tokens, top_k, dtype=torch.int64),
        empty(experts, 2 * wide, hidden), empty(experts, hidden, wide),
    )  # fmt: skip


def launched(x: Inputs, keep: bool = False, backend: str | None = None) -> list[tuple[str, dict]]:
    """The row that a call gets, then names and constexprs of its kernels."""
    seen = []
    with pretend(H100), observed(lambda kernel, args, meta, spill: seen.append((kernel.fn.__name__, meta))):
        row = choose("moe_fwd", problem(x, Options("silu")), backend)
        load(row.target)(x, Options("silu"), keep)
    return [(row.backend, {})] + seen


def test_few_tokens():
    """Streaming kernels take up to three tokens of narrow experts; if something is kept, the other kernels do it."""
    for tokens in (1, 2, 3):
        kernels = launched(inputs(tokens))
        assert [name for name, _ in kernels] == ["hopper_one", "_gate_kernel", "_down_kernel"]
        assert kernels[1][1]["PAIRS"] == 8 * tokens
    assert launched(inputs(1), keep=True)[2][0] == "_product_kernel"
    assert launched(inputs(4))[0][0] == "triton"
    with pretend(H100):
        for other in (inputs(4), inputs(3, top_k=11), inputs(1, wide=2048), inputs(1, hidden=12)):
            assert limits.hopper_one(problem(other, Options("silu"))) is not None
    with pretend(DEVICES[100]):
        assert limits.hopper_one(problem(inputs(1), Options("silu"))) is not None


def held(down: dict) -> int:
    """Bytes of shared memory of a program of the second kernel: whole turns of boxes."""
    boxes = down["TOP_K"] * -(-down["K"] // down["NARROW"])
    return 2 * -(-boxes // down["TURN"]) * down["TURN"] * down["ROWS"] * down["NARROW"]


@pytest.mark.parametrize("wide, top_k", [(768, 8), (8, 26), (6656, 1), (2048, 3)])
def test_two_programs_of_the_second_kernel_share_a_multiprocessor(wide, top_k):
    down = launched(inputs(1, wide=wide, top_k=top_k), backend="hopper_one")[2][1]
    assert 2 * (held(down) + 1024) <= H100.shared_memory


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_program_of_the_second_kernel_has_room_beside_those_of_the_first(tokens):
    """In shared memory, of which each takes 1 KB more, and, with up to 128 registers a thread, among registers."""
    first, second = (meta for _, meta in launched(inputs(tokens))[1:])
    ring = 2 * 2 * first["STAGES"] * first["ROWS"] * first["WIDE"]
    assert hopper_one.PROGRAMS * (ring + 1024) + held(second) + 1024 <= H100.shared_memory
    assert 128 * 32 * (hopper_one.PROGRAMS * first["num_warps"] + second["num_warps"]) <= 65536


@pytest.mark.parametrize("tokens, wide", [(1, 768), (2, 768), (3, 768), (1, 8), (3, 760), (1, 832)])
def test_programs_of_the_first_kernel_get_equally_many_units(tokens, wide):
    """But for the last ones, in as few rounds as a full GPU needs."""
    x = inputs(tokens, wide=wide)
    with pretend(H100):
        tensors = (x.x, x.w_gate_up, x.indices, x.x.new_empty(8 * tokens, wide))
        programs = hopper_one._gate(tensors, "silu").programs
    units, most = 8 * tokens * wide // hopper_one.ROWS, hopper_one.PROGRAMS * H100.sms
    rounds = -(-units // most)
    assert programs <= most and (programs - 1) * rounds < units <= programs * rounds


@pytest.mark.parametrize("wide, top_k", [(768, 8), (760, 7), (264, 3), (8, 26), (2048, 3)])
def test_all_boxes_of_the_second_kernel_are_written(wide, top_k):
    """What lies in shared memory may be no number. And a pair's row of what they are multiplied by has whole boxes."""
    x, seen = inputs(1, wide=wide, top_k=top_k), []
    with pretend(H100), observed(lambda kernel, args, meta, spill: seen.append((args[-1], meta))):
        hopper_one.forward(x, Options("silu"), False)
    (_, gate), (turns, down) = seen
    assert turns * 2 * down["TURN"] * down["ROWS"] * down["NARROW"] == held(down)
    assert gate["LONG"] % down["NARROW"] == 0 and 0 <= gate["LONG"] - wide < down["NARROW"]


def test_tiles_of_products():
    """Boxes, ring and pieces of a tile fit in shared memory; three consumers share its rows and sum in two halves."""
    for tokens in (4096, 8192, 65536):
        kernels = [meta for _, meta in launched(inputs(tokens)) if "CONSUMERS" in meta]
        assert len(kernels) == 2
        for meta in kernels:
            plan = hopper_products.Plan(*(meta[name] for name in hopper_products.Plan.__dataclass_fields__))
            rows = plan.CONSUMERS * plan.BLOCK_M
            assert rows == hopper_products.rows_of(8 * tokens, 128) and plan.HALVES == (rows == 192)
            step = 2 * 64 * (rows + plan.BLOCK_N)
            pieces = 2 * plan.CONSUMERS * plan.BUFFERS * plan.BLOCK_M * plan.PIECE
            assert plan.STAGES * step + pieces + 1024 <= H100.shared_memory


@pytest.mark.parametrize(
    "tokens, wide, gathered", [(8192, 768, True), (2048, 2048, True), (8192, 1024, True), (8192, 2048, False),
                               (2048, 8192, False), (12288, 1024, False), (65536, 768, False)]
)  # fmt: skip
def test_rows_are_gathered_or_copied(tokens, wide, gathered):
    """By the first product, in tall tiles and where it does not cost more than the pass; else copied before it."""
    kernels = launched(inputs(tokens, wide=wide))[1:]
    first, second = (meta for _, meta in kernels if "GATHER" in meta)
    assert first["GATHER"] == gathered and not second["GATHER"]
    assert ("_spread_kernel" in [name for name, _ in kernels]) != gathered
    assert first["CONSUMERS"] == 3 or not gathered


def test_descriptors_are_widened_where_it_was_asked_for(monkeypatch):
    widened = []
    monkeypatch.setattr(hopper_wide, "widen", widened.append)
    boxes = hopper_wide._Widened(frozenset({1, 3}))
    for place in range(5):
        boxes[place, 4096] = [place, "shape"]
    assert widened == [1, 3] and boxes[2, 4096] == [2, "shape"]


def test_only_tensor_maps_are_widened(monkeypatch):
    monkeypatch.setattr(hopper_wide, "difference", lambda: (3, 0x20, 0x30))
    assert not hopper_wide.widen(object())


def test_one_bit_is_changed(monkeypatch):
    """A tensor map that lies behind an object's head, at the next multiple of 128 bytes."""
    import ctypes

    class PyCUtensorMap:
        pass

    memory = ctypes.create_string_buffer(512)
    start = -(-ctypes.addressof(memory) // 128) * 128
    monkeypatch.setattr(hopper_wide, "difference", lambda: (3, 0x20, 0x30))
    monkeypatch.setattr(hopper_wide, "id", lambda box: start, raising=False)
    byte = ctypes.c_uint8.from_address(start + 128 + 3)
    byte.value = 0x6D
    assert hopper_wide.widen(PyCUtensorMap()) and byte.value == 0x7D
    assert not hopper_wide.widen(PyCUtensorMap()) and byte.value == 0x7D  # it fetches 256 bytes already


def test_long_sums_for_the_weights_wait_for_the_kernel_ahead():
    """See `begins_early`."""
    seen = []
    with pretend(H100), observed(lambda kernel, args, meta, spill: seen.append(meta["launch_pdl"])):
        for pairs in (16384, 262144):
            a, b = (torch.empty(pairs, n, dtype=torch.bfloat16, device="meta") for n in (1024, 512))
            hopper_outer.outer(a, b, torch.empty(129, dtype=torch.int32, device="meta"))
    assert seen == [True, False]
