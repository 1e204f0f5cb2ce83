"""How the Hopper forward is tiled: configurations, what fits in shared memory, and what balances programs."""

from typing import NamedTuple

import torch

from adatom.ops.attention.problem import Inputs
from adatom.ops.attention.triton_call import Call


class Config(NamedTuple):
    """How the kernel is tiled: `consumers` warpgroups of block_m queries each, block_n keys, `stages` buffers of keys
    and of values, registers of a consumer's thread; persistent: as many programs as multiprocessors, or `each` on every
    one; spill: bytes of registers that options may make it spill."""

    consumers: int
    block_m: int
    block_n: int
    stages: int
    registers: int
    persistent: bool
    spill: int = 0
    each: int = 1


_PAIR = Config(2, 64, 128, 2, 240, True)
_WIDE = Config(2, 64, 64, 2, 240, True)
_THREE = Config(3, 64, 128, 4, 160, True, spill=64)
# (largest head_dim, kind of call) -> queries (of packed sequences, on average) from which a tile serves: tile;
# measured, see docs/hopper.md
CONFIGS: dict[tuple[int, str], dict[int, Config]] = {
    (64, "full"): {0: _PAIR._replace(stages=4), 1024: _THREE},
    (64, "causal"): {0: _PAIR._replace(stages=4), 4096: _THREE, 8192: _THREE._replace(persistent=False)},
    (64, "bias"): {0: _PAIR._replace(spill=64)},
    (128, "full"): {0: _PAIR, 8192: _PAIR._replace(persistent=False)},
    (128, "causal"): {0: _PAIR, 16384: _PAIR._replace(persistent=False)},
    (128, "bias"): {0: _PAIR._replace(spill=64)},
    (256, "full"): {0: _WIDE, 8192: _WIDE._replace(persistent=False)},
    (256, "causal"): {0: _WIDE._replace(persistent=False)},
    (256, "bias"): {0: _WIDE._replace(spill=64)},
    (64, "window"): {0: _PAIR._replace(stages=4)},
    (128, "window"): {0: _PAIR},
    (256, "window"): {0: _WIDE._replace(persistent=False)},
    (64, "packed"): {0: _PAIR._replace(stages=4), 3000: _THREE},
    (128, "packed"): {0: _PAIR._replace(persistent=False)},
    (256, "packed"): {0: _WIDE._replace(persistent=False)},
}

# the same for the kernel without maxima, by keys; None: that with maxima. What spills is what computes a tile again
_FAST = _PAIR._replace(spill=104)
_FAST_64, _FAST_THREE = _FAST._replace(stages=4), _THREE._replace(spill=400)
_FAST_ONE = Config(1, 64, 64, 3, 136, True, spill=96, each=3)
FAST: dict[tuple[int, str], dict[int, Config | None]] = {
    (64, "full"): {0: None, 256: _FAST_ONE, 1024: _FAST_64, 2048: None, 4096: _FAST_THREE},
    (64, "causal"): {0: None, 1024: _FAST_64},
    (64, "square"): {0: None, 512: _FAST_64, 16384: _FAST_THREE},
    (64, "window"): {0: None, 1024: _FAST_64},
    (64, "packed"): {0: None, 256: _FAST_64},
    (64, "packed square"): {0: None, 128: _FAST_64},
    (128, "full"): {0: None, 512: _FAST._replace(block_n=64, stages=4), 1024: _FAST},
    (128, "causal"): {0: None, 1024: _FAST},
    (128, "square"): {0: None, 512: _FAST},
    (128, "window"): {0: None, 1024: _FAST},
    (128, "packed"): {0: None, 256: _FAST},
    (128, "packed square"): {0: None, 128: _FAST},
}


def in_place(dims: tuple[int, int]) -> bool:
    """Whether out takes the place of the queries: there is no room for both."""
    return dims == (256, 256)


def stages(config: Config, call: Call, dims: tuple[int, int]) -> tuple[int, int]:
    """(buffers of queries, of a bias) that fit in shared memory beside all else; (0, 0) where not one of each does."""
    bias, rows = call.x.bias, config.consumers * config.block_m
    q = rows * dims[0] * 2
    out = 0 if in_place(dims) else rows * dims[1]
    free = (call.device.shared_memory + 1024) // config.each - 2048  # the system takes 1 KB of each program's
    free -= (out + config.stages * config.block_n * sum(dims)) * 2
    block = rows * config.block_n * bias.element_size() if bias is not None and call.meta["BIAS"] == 3 else 0
    several = 2 if config.persistent else 1
    for stages in ((several, 2), (several, 1), (1, 1)):
        if stages[0] * q + stages[1] * block <= free:
            return stages
    return 0, 0


def _kind(call: Call) -> str:
    if call.x.bias is not None:
        return "bias"
    if call.varlen:
        return "packed"
    return "window" if call.left >= 0 else "causal" if call.right >= 0 else "full"


def one_packing(x: Inputs) -> bool:
    """Whether queries and keys are packed alike, which the host knows if it was given one tensor twice."""
    q, k = x.cu_seqlens_q, x.cu_seqlens_k
    if q is None or k is None:
        return False
    return q is k or q.data_ptr() == k.data_ptr() != 0 and (q.stride(), q.dtype) == (k.stride(), k.dtype)


def square(call: Call) -> bool:
    """Whether the edges of a causal mask, and of a window, are known to lie where tiles of 128 queries end."""
    known = call.right >= 0 and call.x.kv_lens is None and (not call.varlen or one_packing(call.x))
    known = known and call.len_k >= call.len_q and (call.len_k - call.len_q) % 128 == 0
    if call.right > 0:  # a window ahead of the diagonal, too
        known = known and call.left >= 0 and call.right % 128 == 0 and call.len_k % 128 == 0
    return known and (call.left < 0 or call.left >= 255 and call.left % 128 in (0, 127))


def pick(call: Call, dims: tuple[int, int]) -> Config:
    """The configuration for a call."""
    table = CONFIGS[next(d for d in (64, 128, 256) if max(dims) <= d), _kind(call)]
    length = call.len_q // max(call.batch, 1) if call.varlen else call.len_q
    return table[max(n for n in table if n <= length)]


def without_maxima(call: Call, dims: tuple[int, int]) -> Config | None:
    """The configuration of the kernel without maxima, where that serves and was measured as faster (docs/hopper.md)."""
    if call.x.bias is not None or call.o.softcap > 0 or call.o.scale <= 0 or call.varlen and call.left >= 0:
        return None
    if call.x.q.dtype != torch.bfloat16 or dims not in ((64, 64), (128, 128)):
        return None
    kind = _kind(call)
    length = call.len_k // max(call.batch, 1) if call.varlen else call.len_k
    if kind == "causal" and dims[0] == 64 and call.head_dim % 16 > 0 and length >= 4096:
        return _FAST_THREE  # rows of keys are no whole sectors of 32 bytes: larger tiles read less of them
    if kind in ("causal", "packed") and square(call):
        kind = "square" if kind == "causal" else "packed square"
    table = FAST[dims[0], kind]
    return table[max(n for n in table if n <= length)]


def imbalance(group: int, call: Call, config: Config) -> float:
    """How much longer than the average the longest of the persistent programs works on causal tiles, heads going in
    such groups: a model of `_tile`, `_blocks` and `tile_number`, in blocks of keys, a tile costing one more."""
    rows, programs = config.consumers * config.block_m, call.device.sms
    n_blocks, n_heads = -(-call.len_q // rows), call.batch * call.heads
    t = torch.arange(min(n_blocks * n_heads, 64 * programs), device="cpu")
    first = t // (group * n_blocks) * group
    block = n_blocks - 1 - (t - first * n_blocks) // (n_heads - first).clamp(max=group)
    begin = block * rows + call.len_k - call.len_q
    keys = (begin + rows + call.right).clamp(min=1, max=max(call.len_k, 1))
    hidden = (begin - call.left).clamp(min=0) // config.block_n if call.left >= 0 else 0
    place, turn = t % programs, t // programs
    program = torch.where(turn % 2 == 1, programs - 1 - place, place)
    cost = (keys + config.block_n - 1) // config.block_n - hidden + 1
    load = torch.zeros(programs, dtype=cost.dtype, device="cpu").scatter_add_(0, program, cost)
    return float(load.max() / load.double().mean())


_TOGETHER = 8  # heads, where tiles are counted; measured, see docs/hopper.md


def balance(config: Config, call: Call, takes: bool = False) -> tuple[Config, int]:
    """(config, how many heads go together). takes: whether programs take tiles from a counter.

    Persistent programs go through a head at a time; under a causal mask, as few as balance them: about one or two waves
    of tiles, so that memory is read evenly; of long ones, as many as balance them best. Where nothing balances them,
    programs are not persistent. A counter balances any; keys and values need not all fit in L2 then, as tiles beside
    each other read about the same of them. Under a window, all heads of a batch element go together, or all that fit in
    L2.
    """
    most = call.counts()[4]
    if call.varlen:  # the table of tiles says what comes when
        return config, 1
    if not config.persistent or call.right < 0:
        return config, most if not config.persistent else 1
    if call.left >= 0:
        return config, min((call.heads, most), key=lambda group: imbalance(group, call, config))
    if takes:
        return config, min(_TOGETHER, call.batch * call.heads)
    waves = call.device.sms / -(-call.len_q // (config.consumers * config.block_m))
    long = call.len_q >= 2048
    tried = []
    for group in (*(max(1, min(most, int(n * waves))) for n in (1.5, 1, 2, 3)), *([most] if long else [])):
        tried.append((imbalance(group, call, config), group))
        if tried[-1][0] <= 1.03 and not long:
            break
    worst, group = min(tried)
    return (config, group) if worst <= 1.1 else (config._replace(persistent=False), most)


def counted(config: Config, call: Call) -> bool:
    """Whether programs of the kernel without maxima take tiles from a counter, so that who is faster takes more: where
    that was measured as faster, and so much work that it is worth a launch that zeroes the counter. That of packed
    sequences lies in the table of their tiles."""
    if call.varlen:
        return config.persistent
    tiles = call.programs(call.len_q, config.consumers * config.block_m)
    much = tiles >= 4 * call.device.sms and tiles * call.len_k >= 7680 * call.device.sms
    measured = call.left < 0 and (call.right >= 0 or max(call.head_dim, call.head_dim_v) > 64)
    return config.persistent and much and measured
