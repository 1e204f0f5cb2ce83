"""Attention forward on Hopper (Gluon): a producer warp feeds queries, keys and values to consumer warpgroups by TMA.

The schedule is FlashAttention-3's (Shah et al., arXiv:2407.08608). Each consumer owns BLOCK_M queries. It issues
Q K^T of one block of keys and P V of the block before together, and computes the softmax of the one while P V of the
other is under way: overlap within a warpgroup. Consumers take turns at issuing products, so that the softmax of one
runs under the products of another: ping-pong. P stays in registers, as the left operand of P V. Keys are walked from
the last to the first. A persistent program works on several tiles: one's epilogue runs under the loads of the next.
"""

from typing import NamedTuple

import torch

from adatom.ops.attention import hopper_deep_fwd
from adatom.ops.attention.hopper_fwd_fast import _fast_kernel
from adatom.ops.attention.hopper_fwd_plan import (
    balance,
    counted,
    in_place,
    one_packing,
    pick,
    square,
    stages,
    without_maxima,
)
from adatom.ops.attention.hopper_fwd_tiles import (
    FULL,
    KEY,
    QUERY,
    TURN,
    blocks_of,
    clear_padding,
    count_tiles,
    make_plan,
    make_rings,
    masked_scores,
    multiply_both,
    multiply_queries,
    nothing_seen,
    own_queries,
    producer,
    settle,
    softmax_step,
    tile_of,
    write_out,
)
from adatom.ops.attention.hopper_packed import table_launch, table_size
from adatom.ops.attention.problem import Inputs, Options, empty_lse, empty_out
from adatom.ops.attention.triton_call import Call, remembered
from adatom.tiles import launch
from adatom.tiles.hopper import (
    LN2,
    Launch,
    boxed,
    gl,
    gluon,
    keys_shared,
    lap,
    let_next,
    mbarrier,
    named_arrive,
    named_sync,
    release,
    slot,
    tile_number,
    tiles_of_program,
    tma,
    wait_for_previous,
    wait_full,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def _load_bias(Bias, bias_strides, bias_s, bias_full, bias_empty, n, b, h, m0, n0, i, len_q, len_k,
               C: gl.constexpr, PLAN: gl.constexpr, LAYOUT: gl.constexpr):
    """What is added to the scores of queries m0 + i and keys n0.., block n of the ring, to broadcast against them."""
    stride_b, stride_h, stride_m, stride_n = bias_strides
    if PLAN.BIAS == FULL:
        wait_full(bias_full, n, PLAN.BIAS_STAGES)
        bias = bias_s.index(slot(n, PLAN.BIAS_STAGES) * PLAN.CONSUMERS + C).load(LAYOUT)
        release(bias_empty, n, PLAN.BIAS_STAGES)
        return bias
    elif PLAN.BIAS == KEY:
        X = Bias + (b.to(gl.int64) * stride_b + h.to(gl.int64) * stride_h + n0.to(gl.int64) * stride_n)
        BLOCK_N: gl.constexpr = PLAN.BLOCK_N
        key = gl.arange(0, BLOCK_N, gl.BlockedLayout([1], [32], [4], [0]))  # read once, then spread to all rows
        bias = gl.load(X + key * stride_n, mask=key < len_k - n0, other=0)
        return gl.convert_layout(bias, gl.SliceLayout(0, LAYOUT))[None, :]
    elif PLAN.BIAS == QUERY:
        X = Bias + (b.to(gl.int64) * stride_b + h.to(gl.int64) * stride_h + m0.to(gl.int64) * stride_m)
        return gl.load(X + i * stride_m, mask=i < len_q - m0, other=0)[:, None]
    else:
        return 0.0


@gluon.jit
def _probabilities(s, m, l, n, b, h, m0, n0, len_q, len_k, options, rings, PENDING: gl.constexpr, C: gl.constexpr,
                   PLAN: gl.constexpr, LAYOUT: gl.constexpr):
    """Wait for the scores of block n, whose first key is n0; then a step of the softmax: (p, alpha, m, l).

    PENDING: products begun later, which are left under way."""
    BLOCK_M: gl.constexpr = PLAN.BLOCK_M
    BLOCK_N: gl.constexpr = PLAN.BLOCK_N
    Bias, bias_strides, left, right, scale, softcap = options
    q_s, k_s, v_s, bias_s, o_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, bias_full, bias_empty = rings
    first = m0 + C * BLOCK_M
    i = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT))
    j = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
    bias = _load_bias(Bias, bias_strides, bias_s, bias_full, bias_empty, n, b, h, first, n0, i, len_q,
                      len_k, C, PLAN, LAYOUT)
    s = warpgroup_mma_wait(PENDING, deps=(s,))
    release(k_empty, n, PLAN.STAGES)
    begin, end = keys_shared(first, len_k - len_q, len_k, left, right, PLAN.LEFT, PLAN.RIGHT, BLOCK_M)
    cut = (n0 < begin) | (n0 + BLOCK_N > end)
    s = masked_scores(s, bias, first + i, n0 + j, cut, len_q, len_k, left, right, scale, softcap, PLAN)
    return softmax_step(s, m, l, scale, PLAN)


@gluon.jit
def _consumer(results, given, bias_strides, rings, sizes, n_tiles, scale, softcap, C: gl.constexpr,
              PLAN: gl.constexpr):
    """Computes BLOCK_M rows of out and lse of every tile."""
    BLOCK_M: gl.constexpr = PLAN.BLOCK_M
    BLOCK_N: gl.constexpr = PLAN.BLOCK_N
    STAGES: gl.constexpr = PLAN.STAGES
    q_s, k_s, v_s, bias_s, o_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, bias_full, bias_empty = rings
    heads, kv_heads, n_heads, group, most_q, most_k, left, right = sizes
    Out, OutPtr, Lse, stride_oh, stride_om = results
    Bias, Sinks, Lens, Order = given
    options = (Bias, bias_strides, left, right, scale, softcap)
    n_tiles = count_tiles(Order, n_tiles, sizes, PLAN)
    DIM_V: gl.constexpr = o_s.shape[2]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM_V, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    i = C * BLOCK_M + gl.arange(0, BLOCK_M, ROWS)
    if C == PLAN.CONSUMERS - 1:
        named_arrive(TURN, 256)  # the first consumer begins

    n = 0  # blocks of keys begun
    for turn in range(tiles_of_program(n_tiles)):
        mbarrier.wait(q_full.index(own_queries(turn, C, PLAN)), lap(turn, PLAN.Q_STAGES))
        wait_full(k_full, n, STAGES)
        named_sync(TURN + C, 256)
        s = multiply_queries(turn, n, rings, C, PLAN, S_LAYOUT)
        named_arrive(TURN + (C + 1) % PLAN.CONSUMERS, 256)
        b, h, m0, start_q, start_k, len_q, len_k = tile_of(tile_number(turn), Order, Lens, sizes, PLAN)
        begin, blocks = blocks_of(m0, len_q, len_k, left, right, PLAN)
        n0 = begin + (blocks - 1) * BLOCK_N
        m, l = nothing_seen(Sinks, h, ROWS, PLAN)
        acc = gl.zeros([BLOCK_M, DIM_V], gl.float32, O_LAYOUT)
        p, alpha, m, l = _probabilities(s, m, l, n, b, h, m0, n0, len_q, len_k, options, rings, 0, C, PLAN, S_LAYOUT)
        p = gl.convert_layout(p.to(o_s.dtype), P_LAYOUT, assert_trivial=True)
        if PLAN.LENS or PLAN.VARLEN:
            clear_padding(v_s.index(slot(n, STAGES)), v_full, n, len_k - n0, PLAN)
        n += 1

        for _ in range(blocks - 1):
            n0 -= BLOCK_N
            s, acc = multiply_both(p, acc, turn, n, rings, C, PLAN, S_LAYOUT)
            pf, alpha, m, l = _probabilities(s, m, l, n, b, h, m0, n0, len_q, len_k, options, rings, 1, C, PLAN,
                                             S_LAYOUT)
            acc, p = settle(acc, pf, n - 1, rings, PLAN, P_LAYOUT)
            acc = acc * gl.convert_layout(alpha, O_ROWS)[:, None]
            n += 1

        if not PLAN.IN_PLACE:
            mbarrier.arrive(q_empty.index(own_queries(turn, C, PLAN)), count=1)
        wait_full(v_full, n - 1, STAGES)
        acc = warpgroup_mma(p, v_s.index(slot(n - 1, STAGES)), acc, is_async=True)
        seen = l > 0.0
        l = gl.where(seen, l, 1.0)
        lse = gl.where(seen, m * (LN2 if PLAN.FOLD else 1.0) + gl.log2(l) * LN2, float("-inf"))
        row = (b.to(gl.int64) * heads + h) * most_q + start_q
        gl.store(Lse + row + m0 + i, lse, mask=m0 + i < len_q)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        release(v_empty, n - 1, STAGES)
        acc = acc * gl.convert_layout(1.0 / l, O_ROWS)[:, None]
        if PLAN.IN_PLACE:
            o = q_s.index(own_queries(turn, C, PLAN))
        else:
            o = o_s.index(C)
            tma.store_wait(0)  # the tile before has left
            gl.barrier()
        write_out(results, acc, o, b, h, m0 + C * BLOCK_M, start_q, len_q, PLAN)
        if PLAN.IN_PLACE:
            tma.store_wait(0)
            gl.barrier()
            mbarrier.arrive(q_empty.index(own_queries(turn, C, PLAN)), count=1)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "kv_heads", "n_heads", "group", "len_q", "len_k", "left", "right", "n_tiles"])
def _fwd_kernel(Q, K, V, Bias, Sinks, Lens, Order, Out, OutPtr, Lse, stride_oh, stride_om,
                stride_bb, stride_bh, stride_bm, stride_bn, bias_b, bias_h, heads, kv_heads, n_heads, group, len_q,
                len_k, left, right, n_tiles, scale, softcap,
                BIAS: gl.constexpr, SOFTCAP: gl.constexpr, FOLD: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
                MASK: gl.constexpr, SINKS: gl.constexpr, LENS: gl.constexpr, VARLEN: gl.constexpr,
                HEAD_DIM_V: gl.constexpr, EARLY: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_M: gl.constexpr,
                BLOCK_N: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr, BIAS_STAGES: gl.constexpr,
                REGISTERS: gl.constexpr, IN_PLACE: gl.constexpr):
    PLAN: gl.constexpr = make_plan(BIAS, SOFTCAP, FOLD, LEFT, RIGHT, MASK, SINKS, LENS, VARLEN, HEAD_DIM_V, CONSUMERS,
                                   BLOCK_M, BLOCK_N, Q_STAGES, STAGES, BIAS_STAGES, IN_PLACE)
    rings = make_rings(Q, K, V, Bias, Out, PLAN)
    let_next(EARLY)
    wait_for_previous(EARLY)
    sizes = (heads, kv_heads, n_heads, group, len_q, len_k, left, right)
    strides = (stride_bb, stride_bh, stride_bm, stride_bn)
    results = (Out, OutPtr, Lse, stride_oh, stride_om)
    given = (Bias, Sinks, Lens, Order)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consumer, (results, given, strides, rings, sizes, n_tiles, scale, softcap, 0, PLAN)),
            (_consumer, (results, given, strides, rings, sizes, n_tiles, scale, softcap, 1, PLAN)),
            (producer, (Q, K, V, Bias, Lens, Order, bias_b, bias_h, rings, sizes, n_tiles, PLAN)),
        ], [4, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (_consumer, (results, given, strides, rings, sizes, n_tiles, scale, softcap, 0, PLAN)),
            (_consumer, (results, given, strides, rings, sizes, n_tiles, scale, softcap, 1, PLAN)),
            (_consumer, (results, given, strides, rings, sizes, n_tiles, scale, softcap, 2, PLAN)),
            (producer, (Q, K, V, Bias, Lens, Order, bias_b, bias_h, rings, sizes, n_tiles, PLAN)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])


_REGISTERS = 65536  # of a multiprocessor


class Launches(NamedTuple):
    """The launches of one forward: what follows from shapes and options."""

    table: launch.Launch | None  # of the tiles of packed sequences
    main: Launch
    lines: int  # numbers of that table
    fast: bool  # main is the kernel without maxima
    counted: bool  # its programs take tiles from a counter of their own


def _launches(x: Inputs, o: Options, out: torch.Tensor) -> Launches | hopper_deep_fwd.Fast:
    call = Call(x, o)
    split = hopper_deep_fwd.without_maxima(call) if call.head_dim <= 96 else None
    if split is not None:
        return hopper_deep_fwd.fast_launch(call, split)
    dims = call.meta["BLOCK_D"], call.meta["BLOCK_DV"]
    without = without_maxima(call, dims)
    fast = without is not None
    chosen = without or pick(call, dims)
    takes = fast and counted(chosen, call)
    config, group = balance(chosen, call, takes)
    q_stages, bias_stages = stages(config, call, dims)
    if not q_stages:
        config = config._replace(block_n=config.block_n // 2)
        q_stages, bias_stages = stages(config, call, dims)
    rows = config.consumers * config.block_m
    n_tiles = call.programs(call.len_q, rows)
    meta = dict(
        LEFT=call.left >= 0,
        RIGHT=call.right >= 0,
        MASK=call.left >= 0 or call.right >= 0 or not call.even(call.len_k, config.block_n),
        SINKS=x.sinks is not None,
        LENS=x.kv_lens is not None,
        VARLEN=call.varlen,
        HEAD_DIM_V=call.head_dim_v if call.varlen or fast else 0,  # TMA knows it otherwise
        EARLY=True,
        CONSUMERS=config.consumers,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        Q_STAGES=q_stages,
        STAGES=config.stages,
        REGISTERS=config.registers,
        num_warps=4,
        launch_pdl=True,
    )
    blocks = {
        "Q": (config.block_m, dims[0]),
        "K": (config.block_n, dims[0]),
        "V": (config.block_n, dims[1]),
        "Out": (config.block_m, dims[1]),
    }
    heads, kv_heads, _, n_heads, _, *lengths = call.counts()
    sizes = (heads, kv_heads, n_heads, group, *lengths, n_tiles, call.scale)
    programs = min(n_tiles, config.each * call.device.sms) if config.persistent else n_tiles
    if config.each > 1:
        meta["maxnreg"] = _REGISTERS // (config.each * 128 * (config.consumers + 1)) // 8 * 8
    if fast:
        fits = square(call) and rows == config.block_n == 128 and config.persistent
        meta |= dict(SQUARE=fits * (2 if call.right > 0 else 1), COUNTED=takes, HEAD_DIM=call.head_dim)
        scalars = (*call.strides(out)[1:], *call.strides(x.k), *call.strides(x.v), *sizes)
        main = Launch(_fast_kernel, programs, scalars, meta, config.spill, blocks)
    else:
        bias = x.bias
        masks = o.softcap == 0 and (bias is None or bias.dtype == torch.bool)
        meta |= dict(
            BIAS=call.meta["BIAS"],
            SOFTCAP=o.softcap > 0,
            FOLD=o.scale > 0 and masks,
            BIAS_STAGES=bias_stages,
            IN_PLACE=in_place(dims),
        )
        if meta["BIAS"] == 3:
            blocks["Bias"] = (config.block_m, config.block_n)
        several = [int(stride > 0) for stride in call.bias_strides[:2]]
        scalars = (*call.strides(out)[1:], *call.bias_strides, *several, *sizes, o.softcap)
        main = Launch(_fwd_kernel, programs, scalars, meta, config.spill, blocks)
    table = table_launch(call, rows, 3 * call.device.sms * rows) if call.varlen else None
    return Launches(table, main, table_size(call, rows), fast, takes and not call.varlen)


def forward(x: Inputs, o: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse; the contract is in docs/design.md."""
    out, lse = empty_out(x.q, x.v), empty_lse(x.q)
    plan = remembered(x, "fwd, one packing" if one_packing(x) else "fwd", lambda: _launches(x, o, out))
    if isinstance(plan, hopper_deep_fwd.Fast):
        plan(x, out, lse)
        return out, lse
    bias, order = x.bias, None
    if bias is not None and bias.dtype == torch.bool:
        bias = bias.view(torch.uint8)
    if plan.table is not None:
        order = torch.empty(plan.lines, dtype=torch.int32, device=lse.device)
        plan.table(order, x.cu_seqlens_q, x.cu_seqlens_k)
    q, k, v = boxed(x.q), boxed(x.k), boxed(x.v)
    if plan.fast:
        taken = torch.zeros(1, dtype=torch.int32, device=lse.device) if plan.counted else None
        plan.main(q, k, v, x.sinks, x.kv_lens, order, taken, boxed(out), x.k, x.v, out, lse)
    else:
        plan.main(q, k, v, bias, x.sinks, x.kv_lens, order, boxed(out), out, lse)
    return out, lse
