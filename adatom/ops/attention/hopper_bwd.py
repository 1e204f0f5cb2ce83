"""Attention backward on Hopper (Gluon): a producer warp feeds queries and dO to two consumer warpgroups by TMA.

    P = exp(S - lse);  dP = dO V^T;  dS = P (dP - delta);  delta = rowsum(dO O) - dlse
    dQ = scale dS K;  dK = scale dS^T Q;  dV = P^T dO;  dsinks = -sum exp(sink - lse) delta

A program owns 128 keys, each consumer 64 of them, and walks over blocks of queries, of all heads that share the keys,
from the last to the first (Plan.UP: upwards, Plan.CROSSED: every other tile; Plan.ABREAST: a block of all heads, then
the next one). Under a causal mask, or where tiles are few, it takes some of these heads (`splits_of`), or a range of
a head's queries (Plan.RANGES), and what programs find for one head of keys is added behind (hopper_bwd_cut.py).
S^T = K Q^T and dP^T = V dO^T are formed transposed, so that P^T and dS^T stay in registers as left operands of dV and
dK. dS also goes through shared memory: each consumer multiplies one half of dQ = dS K over all 128 keys and adds it to
a float32 sum in memory by TMA (Plan.CHAINS: to one of several).
Plan.THIRD, fastest beyond head_dim 64 for long sequences: a third warpgroup multiplies dQ (hopper_bwd_third.py). A
kernel ahead computes delta, one behind rounds the sum to dQ (hopper_bwd_ends.py).
Sources: Dao, arXiv:2307.08691; Shah et al., arXiv:2407.08608.

The first keys that visit a block of queries store their piece of dQ (Plan.CLAIM: whoever comes first), and others wait
for that; or the kernel ahead clears the sum (not Plan.FIRST). They add in whatever order they come to it, which alone
varies from run to run: dK and dV repeat bit for bit, dQ but for rounding. ORDERED: at each block of queries they wait
for the keys before, or, where tiles walk upwards, behind, or (Plan.SHIFTED) for who comes earlier by a timetable
(hopper_bwd_adder.py). A sum that nobody adds to is not written: the kernel behind sees that, and takes zeros.

Where the gradient of a full bias is dS itself, tile by tile, the kernel behind may multiply dQ from it
(Plan.DQ_BEHIND): then nobody sums dQ, and consumers do not meet.
"""

from typing import NamedTuple

import torch

from adatom.ops.attention.hopper_bwd_adder import adder
from adatom.ops.attention.hopper_bwd_bias import bias_pass
from adatom.ops.attention.hopper_bwd_cut import pieces_of, sum_of_parts, sum_of_pieces
from adatom.ops.attention.hopper_bwd_ends import blocks_of_head, dq_behind, ends
from adatom.ops.attention.hopper_bwd_feed import BLOCK_N, FULL, HALF, KEY, QUERY, make_plan, producer
from adatom.ops.attention.hopper_bwd_third import THIRD_REGISTERS, third, third_in_order
from adatom.ops.attention.hopper_bwd_walk import consumer
from adatom.ops.attention.hopper_bwd_ways import (
    CONFIGS,
    Work,
    beside_third,
    blocks_inside,
    from_tiles,
    in_flight,
    in_parts,
    ranges_of,
    splits_of,
    way_of,
)
from adatom.ops.attention.hopper_packed import table_launch, table_size
from adatom.ops.attention.problem import Inputs, Options, empty, empty_like, suits_tma
from adatom.ops.attention.triton_call import (
    NO_SPECIALIZE,
    Call,
    bias_grad,
    bias_tiles,
    column_sums,
    query_bias_grad,
    reduce_to,
    remembered,
    sink_grad,
)
from adatom.tiles import launch
from adatom.tiles.hopper import (
    LOG2E,
    Launch,
    fence_async_shared,
    gl,
    gluon,
    let_next,
    make_barriers,
    make_tiles,
    sequences,
    wait_for_previous,
)


@gluon.jit(do_not_specialize=[*NO_SPECIALIZE, "splits", "n_tiles", "whole", "pieces", "together", "ranges"])
def _bwd_kernel(Q, K, V, DOut, Lse, Delta, Bias, DK, DV, DQ, DBias, Sums, DKPtr, DVPtr, Order, Lens, Taken, Turns,
                stride_bb, stride_bh, stride_bn, repeats, bias_b, bias_h, heads, kv_heads, n_heads, group, splits,
                len_q, len_k, left, right, n_tiles, whole, pieces, together, ranges, scale, scale_log2, softcap,
                D: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, SOFTCAP: gl.constexpr,
                LEFT: gl.constexpr, RIGHT: gl.constexpr, EVEN_N: gl.constexpr, LENS: gl.constexpr, VARLEN: gl.constexpr,
                ORDERED: gl.constexpr, FIRST: gl.constexpr, CLAIM: gl.constexpr, UP: gl.constexpr,
                ABREAST: gl.constexpr, CHAINS: gl.constexpr, CROSSED: gl.constexpr, SHIFTED: gl.constexpr,
                THIRD: gl.constexpr, ALONE: gl.constexpr, LOOPS: gl.constexpr, CUT: gl.constexpr, RANGES: gl.constexpr,
                EARLY: gl.constexpr, ONCE: gl.constexpr, DYNAMIC: gl.constexpr, BLOCK_M: gl.constexpr,
                PARTS: gl.constexpr, STAGES: gl.constexpr, RESIDENT: gl.constexpr, LATE: gl.constexpr,
                BIAS: gl.constexpr, BIAS_STAGES: gl.constexpr, TILES: gl.constexpr, DQ_BEHIND: gl.constexpr,
                SUMS: gl.constexpr, WIDE: gl.constexpr, INSIDE: gl.constexpr, KV_STAGES: gl.constexpr,
                REGISTERS: gl.constexpr):
    """dK and dV of blocks of 128 keys; dQ, unscaled, is added to a float32 sum, or left to the kernel behind.

    Tensors come as descriptors. Lse, Delta: float32, one number for each query, the queries of each (batch, head)
    rounded up to BLOCK_M; Lse in log2 units (beside a float bias in natural ones, with a bias per query it is lse less
    that), +inf where a query sees nothing or does not exist. repeats: consecutive batch elements share a slice of the
    bias, whose number is multiplied by bias_b, that of the head by bias_h, which are 0 along dimensions of size 1.
    DBias: as the scores, in the dtype of dS. Sums: float32 (batch, heads, len_k), dS summed over queries. DQ: float32
    [-1, 128], the pieces of `_add_dq` by batch, head, block of queries, chain and consumer. Turns: int32, for each such
    piece how many blocks of keys are through with it. Order: for packed sequences; boxes end with them (`sequences`),
    n_heads is their number, and all are one batch element to other tensors. DKPtr, DVPtr: for WIDE parts; CUT: DKPtr,
    of the pieces of dV and dK. kv_heads: those of dK and dV, `splits` times as many as K and V have. pieces: of a tile
    that is cut. together: SHIFTED, tiles of a head that run together; else 0, on which `third` relies. ranges: of each
    head's queries; then heads and splits count these. scale_log2: scale in log2 units.
    """
    PLAN: gl.constexpr = make_plan(D, HEAD_DIM, HEAD_DIM_V, SOFTCAP, LEFT, RIGHT, EVEN_N, LENS, VARLEN, ORDERED,
                                   FIRST, CLAIM, UP, ABREAST, CHAINS, CROSSED, SHIFTED, THIRD, ALONE, LOOPS, CUT,
                                   RANGES, ONCE, DYNAMIC, BLOCK_M, PARTS, STAGES, RESIDENT, LATE, BIAS, BIAS_STAGES,
                                   TILES, DQ_BEHIND, SUMS, WIDE, INSIDE, KV_STAGES)
    k_s = make_tiles(K, KV_STAGES)
    v_s = make_tiles(V, 2 * KV_STAGES)  # the halves of both consumers
    q_s = make_tiles(Q, STAGES)
    do_s = make_tiles(DOut, STAGES)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], Lse.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], Delta.layout)
    DS: gl.constexpr = [4, BLOCK_M, HALF] if TILES else [2, BLOCK_N, BLOCK_M]
    ds_s = gl.allocate_shared_memory(Q.dtype, DS, gl.NVMMASharedLayout(128, 16, rank=2))
    PIECE: gl.constexpr = gl.NVMMASharedLayout(0, 32, rank=2)
    dq_s = gl.allocate_shared_memory(gl.float32, [2 * max(INSIDE, 1), min(D, 64) // 2, 128], PIECE)
    number_s = gl.allocate_shared_memory(gl.int32, [4 * KV_STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_full = make_barriers(KV_STAGES, 1)
    v_full = make_barriers(KV_STAGES, 2)
    kv_empty = make_barriers(KV_STAGES, 4 if PLAN.ADDER and DYNAMIC else 2)
    q_full = make_barriers(STAGES, 1)
    do_full = make_barriers(STAGES, 1)
    # what nobody looks at is not made (`make_barriers`)
    q_empty, do_empty, ds_full, dq_full, dq_empty, bias_full, bias_empty = (q_full,) * 7
    bias_s = k_s
    if not (PLAN.DENSE or THIRD):
        q_empty = make_barriers(STAGES, 2)
        do_empty = make_barriers(STAGES, 2)
    if THIRD:
        ds_full = make_barriers(2, 1)  # rather empty: the third warpgroup has multiplied what consumers left there
        if not PLAN.ADDER:
            dq_full = make_barriers(1, 1)  # it has added all of a tile
    if LATE and not DQ_BEHIND:
        ds_full = make_barriers(2, 2)
    if PLAN.ADDER:
        dq_full = make_barriers(2, 1)
        dq_empty = make_barriers(2, 1)
    if BIAS == FULL:
        bias_s = make_tiles(Bias, BIAS_STAGES * 2)
        bias_full = make_barriers(BIAS_STAGES, 2)
        bias_empty = make_barriers(BIAS_STAGES, 2)
    ones_s = k_s
    if SUMS:
        ones = gl.full([8, BLOCK_M // PARTS], 1.0, Q.dtype, gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))
        ones_s = gl.allocate_shared_memory(Q.dtype, ones.shape, gl.NVMMASharedLayout(128, 16, rank=2), ones)
    fence_async_shared()
    tiles = (k_s, v_s, q_s, do_s, lse_s, delta_s, ds_s, dq_s, number_s, bias_s, ones_s)
    bars = (k_full, v_full, kv_empty, q_full, q_empty, do_full, do_empty, ds_full, dq_full, dq_empty, bias_full,
            bias_empty)
    wait_for_previous(EARLY)
    let_next(EARLY)
    tile_counts = (n_tiles, whole, pieces, together, ranges)
    counts = (heads, kv_heads, n_heads, group, splits, len_q, len_k, left, right, tile_counts)
    factors = (scale, scale_log2, softcap)
    given = (Bias, (stride_bb, stride_bh, stride_bn), DBias, Sums, repeats)
    slices = (repeats, bias_b, bias_h)
    if THIRD and PLAN.ADDER:
        gl.static_assert(ONCE)
        gl.warp_specialize([
            (consumer, (DK, DV, DQ, DKPtr, DVPtr, Order, Lens, given, tiles, bars, counts, factors, 0, PLAN)),
            (consumer, (DK, DV, DQ, DKPtr, DVPtr, Order, Lens, given, tiles, bars, counts, factors, 1, PLAN)),
            (third_in_order, (Order, Lens, tiles, bars, counts, PLAN)),
            (producer, (Q, K, V, DOut, Lse, Delta, Bias, Taken, Order, Lens, tiles, bars, counts, slices, PLAN)),
            (adder, (DQ, Turns, Order, Lens, tiles, bars, counts, 0, PLAN)),
            (adder, (DQ, Turns, Order, Lens, tiles, bars, counts, 1, PLAN)),
        ], [4, 4, 1, 1, 1], [REGISTERS, THIRD_REGISTERS, 24, 24, 24])  # fmt: skip
    elif THIRD:
        gl.warp_specialize([
            (consumer, (DK, DV, DQ, DKPtr, DVPtr, Order, Lens, given, tiles, bars, counts, factors, 0, PLAN)),
            (consumer, (DK, DV, DQ, DKPtr, DVPtr, Order, Lens, given, tiles, bars, counts, factors, 1, PLAN)),
            (third, (Q, K, V, DOut, Lse, Delta, DQ, Order, Lens, tiles, bars, counts, PLAN)),
        ], [4, 4], [REGISTERS, THIRD_REGISTERS])  # fmt: skip
    elif PLAN.ADDER:
        gl.warp_specialize([
            (consumer, (DK, DV, DQ, DKPtr, DVPtr, Order, Lens, given, tiles, bars, counts, factors, 0, PLAN)),
            (consumer, (DK, DV, DQ, DKPtr, DVPtr, Order, Lens, given, tiles, bars, counts, factors, 1, PLAN)),
            (producer, (Q, K, V, DOut, Lse, Delta, Bias, Taken, Order, Lens, tiles, bars, counts, slices, PLAN)),
            (adder, (DQ, Turns, Order, Lens, tiles, bars, counts, 0, PLAN)),
            (adder, (DQ, Turns, Order, Lens, tiles, bars, counts, 1, PLAN)),
        ], [4, 1, 1, 1], [REGISTERS, 24, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (DK, DV, DQ, DKPtr, DVPtr, Order, Lens, given, tiles, bars, counts, factors, 0, PLAN)),
            (consumer, (DK, DV, DQ, DKPtr, DVPtr, Order, Lens, given, tiles, bars, counts, factors, 1, PLAN)),
            (producer, (Q, K, V, DOut, Lse, Delta, Bias, Taken, Order, Lens, tiles, bars, counts, slices, PLAN)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip


# -- launchers ---------------------------------------------------------------------------------------------------------


class Gradient(NamedTuple):
    """How the gradient of the bias comes about. tiles: stored by the main kernel; sums: dS summed over queries there;
    rows: from lse and delta alone; apart: by a pass of its own, where several (batch, head) share a tile, or it cannot
    be stored as dS is; none of these: not wanted."""

    tiles: bool = False
    sums: bool = False
    rows: bool = False
    apart: bool = False


def _gradient(x: Inputs, o: Options, wanted: bool) -> Gradient:
    kind, shared = bias_grad(x, wanted)
    if kind == FULL.value:
        assert x.bias is not None
        apart = shared or o.softcap > 0 or x.bias.dtype != x.q.dtype or x.k.shape[2] % 8 > 0
        return Gradient(tiles=not apart, apart=apart)
    return Gradient(sums=kind == KEY.value, rows=kind == QUERY.value)


class Launches(NamedTuple):
    """The launches of one backward and the sizes of what they share: what follows from shapes and options."""

    table: launch.Launch | None  # of the tiles of packed sequences
    before: launch.Launch
    main: Launch
    behind: launch.Launch | None  # takes the sum of dQ or, if there is none, dS; none: it is in shared memory
    added: launch.Launch | None  # adds up dK and dV of tiles that are cut, or parts of them
    lines: int  # numbers of that table
    blocks: int  # of queries, of all heads
    block_m: int
    sums: int  # lines of 128 numbers of the sum of dQ
    turns: int  # numbers by which programs wait for each other
    dbias: Gradient
    plain: bool  # delta is wanted as lse lies
    splits: int  # parts of a head's dK and dV
    pieces: tuple[int, ...]  # shape of the sums of pieces of tiles; (): none are cut


def _place(grad: torch.Tensor, splits: int) -> torch.Tensor:
    """Where programs write dK or dV: the gradient itself, or the parts of each head's, side by side. Those of float16
    are float32: a part may be larger than what it is added up to."""
    if splits == 1:
        return grad
    dtype = torch.float32 if grad.dtype == torch.float16 else grad.dtype
    return empty((grad.shape[0], grad.shape[1] * splits, *grad.shape[2:]), grad, dtype)


def _launches(
    x: Inputs, o: Options, out: torch.Tensor, dout: torch.Tensor, grads: tuple[torch.Tensor, ...], dlse: bool,
    wanted: bool, ordered: bool,
) -> Launches:  # fmt: skip
    call = Call(x, o)
    dim = next(d for d in (32, 64, 128) if max(call.head_dim, call.head_dim_v) <= d)
    left, right, lens = call.left >= 0, call.right >= 0, x.kv_lens is not None
    config = CONFIGS[dim, left or right or lens or call.varlen]
    assert dim < 128 or (config.parts, config.late) == (1, False)  # Plan.DENSE waits for products in that order
    inside = blocks_inside(call, dim, config.block_m)
    dbias, kind = _gradient(x, o, wanted), call.meta["BIAS"]
    stored = dbias.tiles and not inside and from_tiles(call, dim, ordered)
    from_stored = dq_behind(call, dim, grads[0]) if stored else None
    summed = not (inside or stored)  # in memory
    ordered = ordered and summed
    splits = splits_of(call, dim, ordered, config.block_m)
    ranges = 1 if inside else ranges_of(call, dim, ordered, splits, config.block_m)
    splits *= ranges
    unsplit, call = call, in_parts(call, splits, ranges, config.block_m)  # from here on each part is a head
    dk, dv = (_place(grad, splits) for grad in grads[1:])
    wide = dk.dtype != x.k.dtype
    n_heads = call.batch if call.varlen else call.batch * call.kv_heads
    n_tiles = call.programs(call.len_k, BLOCK_N.value, kv=True)
    work = Work(
        call, dim, config.block_m, config.tiles, ordered, inside > 0, summed, dbias.sums, n_heads, n_tiles, ranges
    )
    way = way_of(work)
    config = beside_third(config, ordered) if way.third else config
    rows, least, group = in_flight(work, way)
    m, n = config.block_m, BLOCK_N.value
    n_m = blocks_of_head(call, m)
    plain = call.varlen and x.sinks is not None
    natural = kind in (KEY.value, FULL.value) and x.bias.is_floating_point()  # type: ignore[union-attr]
    before, behind = ends(unsplit, dim, m, out, dout, grads[0], way.look, way.chains, DLSE=dlse,
                          SUM=summed and not way.first, TURNS=2 * way.chains * way.first, PLAIN=plain, NATURAL=natural,
                          BIAS=kind == QUERY.value)  # fmt: skip
    sharing, sms = call.heads // max(call.kv_heads, 1), call.device.sms
    rest = n_tiles % sms  # of the last round, of programs that take tiles in turn
    pieces = pieces_of(rest, n_m, sharing, sms) if way.cut and splits == 1 else 1
    whole = n_tiles - rest
    units = whole + rest * pieces
    stride_bb, stride_bh, _, stride_bn = call.bias_strides
    scalars = (
        stride_bb, stride_bh, stride_bn, call.repeats, int(stride_bb > 0), int(stride_bh > 0), call.heads,
        call.kv_heads, n_heads, group, splits, unsplit.len_q, call.len_k, call.left, call.right, units, whole, pieces,
        way.timetable[0] if way.timetable else 0, ranges, call.scale, call.scale * LOG2E.value, o.softcap,
    )  # fmt: skip
    columns = (call.head_dim, call.head_dim_v) if wide else (dim, dim)  # TMA knows them otherwise
    blocks = {
        "Q": (m, dim), "K": (n, dim), "V": (n // 2, dim), "DOut": (m, dim), "Lse": (m,), "Delta": (m,),
        "DK": (n // 2, dim), "DV": (n // 2, dim), "DQ": (min(dim, 64) // 2, 128) if summed else (m // 2, dim),
    }  # fmt: skip
    stages = 1
    if work.full:
        blocks["Bias"] = (m // config.parts, n // 2)
        stages = 1 if x.bias.element_size() > 2 else 2  # type: ignore[union-attr]
    if dbias.tiles:
        blocks["DBias"] = (m, n // 2)
    room = config.late and not work.full and not dbias.sums  # for keys and values of the next tile
    programs = units if way.tiles == "one" else min(n_heads if inside else units, sms)
    main = Launch(
        _bwd_kernel, programs, scalars,
        {
            "D": dim, "HEAD_DIM": columns[0], "HEAD_DIM_V": columns[1], "SOFTCAP": o.softcap > 0, "LEFT": left,
            "RIGHT": right, "EVEN_N": call.even(call.len_k, n), "LENS": lens, "VARLEN": call.varlen,
            "ORDERED": ordered, "FIRST": way.first, "CLAIM": way.claim, "UP": way.up,
            "ABREAST": way.abreast, "CHAINS": way.chains, "CROSSED": way.crossed > 0,
            "SHIFTED": way.timetable is not None, "THIRD": way.third,
            "ALONE": way.third and sharing == 1 and not ordered, "LOOPS": way.loops, "CUT": pieces > 1,
            "RANGES": ranges > 1, "EARLY": True,
            "ONCE": way.tiles == "one", "DYNAMIC": way.tiles == "dynamic" and not inside, "BLOCK_M": m,
            "PARTS": config.parts, "STAGES": config.stages, "RESIDENT": config.resident, "LATE": config.late,
            "BIAS": kind, "BIAS_STAGES": stages, "TILES": dbias.tiles, "DQ_BEHIND": stored,
            "SUMS": dbias.sums, "WIDE": wide, "INSIDE": inside,
            "KV_STAGES": 2 if inside or room and way.tiles == "dynamic" else 1,
            "REGISTERS": config.registers, "num_warps": 4, "launch_pdl": True,
        },
        config.spill, blocks,
    )  # fmt: skip
    table = table_launch(call, n, rows, least, True, m) if call.varlen else None
    n_blocks = blocks_of_head(unsplit, m) * unsplit.heads * (1 if call.varlen else call.batch)
    lines = table_size(call, n, True)
    sums = n_blocks * way.chains * m * dim // 128 if summed else 0
    turns = 2 * n_blocks * way.chains * way.first
    added = None
    if pieces > 1:
        added = sum_of_pieces(call, dim, rest, pieces, whole, (n_heads, group), dk, dv)
    elif splits > 1:
        added = sum_of_parts(unsplit, dim, splits, *grads[1:])
    return Launches(table, before, main, behind if summed else from_stored, added, lines, n_blocks, m, sums, turns,
                    dbias, plain, splits, (units - whole, 2, n, dim) if pieces > 1 else ())


def _grads(x: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Places for dq, dk, dv."""
    return empty_like(x.q), empty_like(x.k), empty_like(x.v)


def _backward(
    x: Inputs, o: Options, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
    wanted: bool, ordered: bool,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    dlse = None if dlse is None else dlse.contiguous()
    dout = dout if suits_tma(dout) else dout.contiguous()
    plan = remembered(x, "bwd", lambda: _launches(x, o, out, dout, _grads(x), dlse is not None, wanted, ordered))
    rows, delta = empty((2, plan.blocks * plan.block_m), lse).unbind()
    total = empty((plan.sums, 128), lse) if plan.sums else None
    taken = torch.empty(1, dtype=torch.int32, device=lse.device)
    turns = torch.empty(plan.turns, dtype=torch.int32, device=lse.device) if plan.turns else None
    order, bias = None, x.bias
    if bias is not None and bias.dtype == torch.bool:
        bias = bias.view(torch.uint8)
    if plan.table is not None:
        order = torch.empty(plan.lines, dtype=torch.int32, device=lse.device)
        plan.table(order, x.cu_seqlens_q, x.cu_seqlens_k)
    plain = empty_like(lse) if plan.plain else None
    plan.before(out, dout, lse, dlse, rows, delta, total, taken, turns, plain, x.cu_seqlens_q, bias)
    padded = plan.blocks * plan.block_m // lse[..., 0].numel()
    dbias = None
    if plan.dbias.apart and total is None:  # ahead, for parts of its sum to take memory that dq, dk and dv take next
        dbias = bias_pass(x, o, rows, delta, dout, padded)
    dq, dk, dv = _grads(x)
    parts = dk_part, dv_part = _place(dk, plan.splits), _place(dv, plan.splits)
    wide = dk_part.dtype != dk.dtype
    described = (dk, dv) if wide else parts
    stored, sums = plan.main.meta["DQ_BEHIND"], column_sums(x, plan.dbias.sums)
    # stored ones are written all over, also outside the mask
    tiles = empty((*x.q.shape[:3], x.k.shape[2]), x.q) if stored else bias_tiles(x, o, plan.dbias.tiles)
    pieces = empty(plan.pieces, lse) if plan.pieces else None
    if plan.main.meta["SHIFTED"]:  # programs wait for some that may not have begun
        launch.take_turn(lse.device)
    plan.main(
        *map(sequences, (x.q, x.k, x.v, dout)), rows, delta, bias, *map(sequences, described),
        dq if total is None else total, tiles, sums,
        dk_part if pieces is None else pieces, dv_part, order, x.kv_lens, taken, turns,
    )  # fmt: skip
    if plan.behind:
        plan.behind(*((tiles, x.k, dq, x.kv_lens) if stored else (total, dq, turns, x.cu_seqlens_q)))
    if pieces is not None:
        plan.added(pieces, dv, dk)
    elif plan.added:
        plan.added(*parts, dk, dv)
    if plain is None and (plan.dbias.rows or x.sinks is not None):
        plain = delta.view(*lse.shape[:2], -1)[..., : lse.shape[2]]
    if plan.dbias.apart and total is not None:
        del total  # whose memory the gradient of the bias takes
        dbias = bias_pass(x, o, rows, delta, dout, padded)
    elif plan.dbias.tiles:
        dbias = tiles
    elif sums is not None:
        dbias = reduce_to(sums, x.bias)  # type: ignore[arg-type]
    elif plan.dbias.rows:
        dbias = query_bias_grad(x, lse, plain, dlse)  # type: ignore[arg-type]
    return dq, dk, dv, dbias, None if x.sinks is None else sink_grad(x, lse, plain)  # type: ignore[arg-type]


def backward(
    x: Inputs, o: Options, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
    wanted: bool,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """dq, dk, dv, dbias (if wanted), dsinks. dq may be summed in an order that varies from run to run."""
    return _backward(x, o, out, lse, dout, dlse, wanted, False)


def backward_ordered(
    x: Inputs, o: Options, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
    wanted: bool,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """As `backward`, bit for bit the same on every run."""
    return _backward(x, o, out, lse, dout, dlse, wanted, True)
