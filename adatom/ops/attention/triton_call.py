"""What the launchers of the Triton attention kernels share: tile configurations, strides, counts, constexprs.

A launcher allocates its results, looks for the `Launch` of each kernel under `remembered`, and calls it with tensors.
What a Launch is built from, a `Call`, is thus worked out once for each signature of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from adatom.device import facts
from adatom.ops.attention.problem import Inputs, Options, Remembered, bias_kind, empty, sum_to_bias
from adatom.tiles.launch import Launch, tile_dim

_BIAS = {"none": 0, "key": 1, "query": 2, "full": 3}
LEAST_BY_TMA = 2**28  # multiply-adds of a product that repay making descriptors
_L2_BYTES = 24 * 2**20  # keys and values of the heads in flight: half of an H100's L2


class Config(NamedTuple):
    """How a kernel is tiled: block_m queries x block_n keys, warps, pipeline stages; tma: operands by tensor
    descriptor; spill: bytes of registers it may spill (options cost registers); registers: at most so many a thread,
    if not 0, where more programs on a multiprocessor are worth it."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = False
    spill: int = 512
    registers: int = 0


# numbers that vary freely
NO_SPECIALIZE = ["heads", "kv_heads", "repeats", "n_heads", "group", "left", "right", "len_q", "len_k"]
Configs = dict[int, dict[tuple[str, int], Config]]
Blocks = dict[str, int | tuple[int, int]]  # what a Launch reads by descriptor
_INTERPRETED = Config(16, 16, 4, 1)
# float32 on sm_100: tiles too low for its matrix unit, whose memory the parts of larger ones overflow (the compiler
# then makes a kernel of one trap; `adatom compile` tells)
LOW_TILES: dict[tuple[str, int], Config] = {
    (kind, dim): config
    for kind in ("tf32", "tf32x3")
    for dim, config in (
        (64, Config(32, 32, 4, 1)),
        (128, Config(32, 32, 8, 1, spill=2048)),
        (256, Config(16, 16, 4, 1, spill=32768)),
    )
}
_forced: dict[str, Config] = {}


@contextmanager
def forcing(name: str, config: Config) -> Iterator[None]:
    """While active, the kernel called `name` ("fwd", "bwd_q", ...) uses `config`. For tuning."""
    before = _forced.get(name)
    _forced[name] = config
    try:
        yield
    finally:
        if before is None:
            del _forced[name]
        else:
            _forced[name] = before


def family(arch: int) -> int:
    """The architecture whose tables serve `arch`: 90 and 100 (227 KB of shared memory), 80 (163 KB) or 86 (99 KB)."""
    if 90 <= arch < 120:
        return 90 if arch < 100 else 100
    return 80 if arch in (80, 87) else 86


def pick(name: str, configs: Configs, call: Call) -> Config:
    """The configuration of kernel `name` for this call.

    A table has a line for each kind of arithmetic and each of the head_dims 64, 128 and 256, up to which it serves. It
    may have more for head_dim 16 and 32, and for calls with options that cost registers or bandwidth, of which the last
    one counts: "half packed", "half softcap", "half bias", "half full bias" (for each query and key), "half wide bias"
    (full, of more bytes than q), "half ragged bias" (full, its rows no multiples of 16).
    """
    if name in _forced:
        return _forced[name]
    if call.device.arch == 0:
        return _INTERPRETED
    table, dim, bias = configs[family(call.device.arch)], max(call.head_dim, call.head_dim_v), call.x.bias
    full = call.meta["BIAS"] == _BIAS["full"]
    options = {
        " packed": call.varlen,
        " softcap": call.o.softcap > 0,
        " bias": bias is not None,
        " full bias": full,
        " wide bias": full and bias.element_size() > call.x.q.element_size(),  # type: ignore[union-attr]
        " ragged bias": full and call.len_k % 16 != 0,
    }
    names = [call.kind + option for option, given in options.items() if given]
    keys = ((name, d) for d in (16, 32, 64, 128, 256) if dim <= d for name in (*reversed(names), call.kind))
    return next(table[key] for key in keys if key in table)


def without_options(table: dict[tuple[str, int], Config]) -> dict[tuple[str, int], Config]:
    """The lines of a table without those for calls with an option."""
    return {key: config for key, config in table.items() if " " not in key[0]}


def plain(table: dict[tuple[str, int], Config]) -> dict[tuple[str, int], Config]:
    """The lines of a table without those for calls with an option, and without tensor descriptors."""
    return {key: config._replace(tma=False) for key, config in without_options(table).items()}


def remembered(x: Inputs, name: str, build: Callable[[], Launch]) -> Launch:
    """The Launch called `name` that earlier calls of this signature built, or a new one."""
    if not isinstance(x, Remembered) or _forced:
        return build()
    launch = x.memo.get(name)
    if launch is None:
        launch = x.memo[name] = build()
    return launch


class Call:
    """One call as the kernels take it: all that follows from shapes and options."""

    widens = True  # whether tiles of v are as wide as `widths` says

    def __init__(self, x: Inputs, o: Options) -> None:
        q, v, bias = x.q, x.v, x.bias
        self.x, self.o = x, o
        self.device = facts(q.device)
        self.varlen = x.cu_seqlens_q is not None
        if self.varlen:
            self.len_q, self.heads, self.head_dim = q.shape
            self.len_k, self.kv_heads, self.head_dim_v = v.shape
            self.batch = x.cu_seqlens_q.shape[0] - 1  # type: ignore[union-attr]
        else:
            self.batch, self.heads, self.len_q, self.head_dim = q.shape
            _, self.kv_heads, self.len_k, self.head_dim_v = v.shape
        self.kind = "half" if q.dtype.itemsize == 2 else o.precision
        self.scale = o.scale
        # causal is a right window of 0
        self.right = (0 if o.window_right < 0 else min(o.window_right, 0)) if o.causal else o.window_right
        self.left = o.window_left
        self.bias_strides = broadcast_strides(bias)
        self.repeats = 1 if bias is None else self.batch // max(bias.shape[0], 1)
        self.piece = 16 // q.element_size()  # elements of which all strides so far are multiples, or 1
        self.generic = bias is not None or o.softcap > 0
        exact = tile_dim(self.head_dim), tile_dim(self.head_dim_v)
        dims = self.widths(*exact) if self.widens else exact
        self.widened = dims != exact
        self.meta = {
            "HEAD_DIM": self.head_dim,
            "HEAD_DIM_V": self.head_dim_v,
            "BLOCK_D": dims[0],
            "BLOCK_DV": dims[1],
            "BIAS": _BIAS[bias_kind(bias)],
            "SOFTCAP": o.softcap > 0,
            "LEFT": self.left >= 0,
            "RIGHT": self.right >= 0,
            "SINKS": x.sinks is not None,
            "LENS": x.kv_lens is not None,
            "VARLEN": self.varlen,
            "PRECISION": self.precision(),
        }

    def widths(self, dim: int, dim_v: int) -> tuple[int, int]:
        """Columns of the tiles of q and k, and of v. A tile of v of 32 columns beside one of 64 went wrong on an H100
        under Triton 3.6 (docs/tuning.md): it gets 64 beside wider ones, and float32 one width for both up to 64."""
        if self.kind in ("tf32", "tf32x3") and max(dim, dim_v) <= 64:
            return max(dim, dim_v), max(dim, dim_v)
        return dim, max(dim_v, 64) if dim > 32 and self.kind != "ieee" else dim_v

    def precision(self) -> str:
        """How products are computed: those of float32 by parts in float16 (docs/tuning.md)."""
        return {"tf32x3": "fp16x3", "tf32": "fp16"}.get(self.kind, "ieee")

    def programs(self, length: int, block: int, kv: bool = False) -> int:
        """How many programs cover `length` rows of every (kv) head in blocks; 0 for an empty problem."""
        heads = self.kv_heads if kv else self.heads
        if self.varlen:
            return (length // block + self.batch) * heads if length else 0
        return -(-length // block) * self.batch * heads

    def parts(self, tiles: int, bias: torch.Tensor) -> int:
        """How many programs share the sum over the (batch, head) of a bias tile: several where tiles are few."""
        shared = self.batch * self.heads // max(bias.shape[0] * bias.shape[1], 1)
        parts = max(1, min(shared // 4, 3 * self.device.sms // max(tiles, 1)))
        return -(-shared // -(-shared // parts)) if shared else 1  # each has something to add

    def bias_programs(self, config: Config, bias: torch.Tensor) -> tuple[int, int]:
        """How many programs sum the gradient of a shared bias, and in how many parts."""
        tiles = -(-self.len_q // config.block_m) * -(-self.len_k // config.block_n) * bias.shape[0] * bias.shape[1]
        parts = self.parts(tiles, bias)
        return tiles * parts, parts

    def counts(self, kv: bool = False) -> tuple[int, ...]:
        """heads, kv_heads, repeats, n_heads (all (kv) heads; sequences when packed), group, len_q, len_k, left, right.

        repeats: how many consecutive batch elements share a slice of the bias.
        """
        heads = self.kv_heads if kv else self.heads
        n_heads = self.batch if self.varlen else self.batch * heads
        length, sharing = (self.len_q, 1) if kv else (self.len_k, self.heads // max(self.kv_heads, 1))
        head_bytes = length * (self.head_dim + self.head_dim_v) * self.x.k.element_size()
        group = max(1, min(n_heads, _L2_BYTES * sharing // max(head_bytes, 1)))
        return (self.heads, self.kv_heads, self.repeats, n_heads, group, self.len_q, self.len_k, self.left, self.right)

    def constexprs(self, config: Config, **more: Any) -> dict[str, Any]:
        """The constexprs that every kernel takes, and its launch options; to be asked for after all `strides`.

        float32 operands that a tile would read by descriptor, but come by pointer, are not pipelined: their parts fill
        the shared memory.
        """
        meta = {key: value for key, value in self.meta.items() if key != "SINKS"}
        early = self.device.arch >= 90
        by_pointer = config.tma and not more["TMA"] and self.kind != "half"
        return (
            meta
            | more
            | {
                "ALIGNED": self.len_k % 16 == 0,
                "EVEN_M": self.even(self.len_q, config.block_m),
                "EVEN_N": self.even(self.len_k, config.block_n),
                "EARLY": early,
                "PIECE": self.piece,
                "BLOCK_M": config.block_m,
                "BLOCK_N": config.block_n,
                "num_warps": config.num_warps,
                "num_stages": 1 if by_pointer else config.num_stages,
                "maxnreg": config.registers or None,
                "launch_pdl": early,
            }
        )

    def even(self, length: int, block: int) -> bool:
        """Whether there are blocks of that length, all of them whole, known without looking at the device."""
        return not self.varlen and self.x.kv_lens is None and length > 0 and length % block == 0

    def strides(self, x: torch.Tensor) -> tuple[int, int, int]:
        """Batch, head and length strides; packed tensors have no batch stride."""
        strides = (0, x.stride(1), x.stride(0)) if self.varlen else (x.stride(0), x.stride(1), x.stride(2))
        if any(stride % self.piece for stride in strides):
            self.piece = 1
        return strides

    def use_tma(self, config: Config, *tensors: torch.Tensor, keys: bool = True) -> bool:
        """Whether to read these by descriptor: large enough to repay making one, and laid out for it.

        keys: some are keys or values, of which those beyond kv_lens must not be read (they may be NaN).
        """
        return (
            config.tma
            and not self.varlen
            and not self.widened
            and not (keys and self.x.kv_lens is not None)
            and self.batch * self.heads * self.len_q * self.len_k * self.head_dim >= LEAST_BY_TMA
            and all(
                x.data_ptr() % 16 == 0
                and x.stride(3) == 1
                and all(s > 0 and s * x.element_size() % 16 == 0 for s in x.stride()[:3])
                for x in tensors
            )
        )

    def bias_by_tma(self, tma: bool) -> bool:
        """Whether to read the bias by descriptor too, where the operands are: a full one, laid out for it."""
        bias = self.x.bias
        return (
            tma
            and bias is not None
            and self.meta["BIAS"] == 3
            and bias.is_floating_point()
            and bias.data_ptr() % 16 == 0
            and bias.stride(3) == 1
            and all(s > 0 and s * bias.element_size() % 16 == 0 for s in bias.stride()[:3])
        )


def bias_grad(x: Inputs, wanted: bool) -> tuple[int, bool]:
    """(kind of the bias whose gradient is wanted or 0, whether it is a full one that several (batch, head) share)."""
    kind = _BIAS[bias_kind(x.bias)] if wanted else 0
    return kind, kind == 3 and tuple(x.bias.shape[:2]) != tuple(x.q.shape[:2])  # type: ignore[union-attr]


def bias_tiles(x: Inputs, o: Options, wanted: bool) -> torch.Tensor | None:
    """Where a pass over queries writes the tiles of an unshared dbias."""
    if not wanted:
        return None
    shape, dtype = (*x.q.shape[:3], x.k.shape[2]), x.bias.dtype  # type: ignore[union-attr]
    # tiles outside the mask are never visited
    skips = o.causal or o.window_left >= 0 or o.window_right >= 0 or x.kv_lens is not None
    return x.q.new_zeros(shape, dtype=dtype) if skips else empty(shape, x.q, dtype)


def column_sums(x: Inputs, wanted: bool) -> torch.Tensor | None:
    """Where a pass over keys writes the sums of its columns: float32 (batch, heads, 1, seqlen_k)."""
    if not wanted:
        return None
    return empty((*x.q.shape[:2], 1, x.k.shape[2]), x.q, torch.float32)


def _of_sinks(x: Inputs, lse: torch.Tensor, per_row: torch.Tensor) -> torch.Tensor:
    """exp(sink - lse) * per_row for each query, like lse; 0 for a query that sees nothing."""
    assert x.sinks is not None
    shape = (-1, 1) if x.cu_seqlens_q is not None else (1, -1, 1)
    p = torch.exp(x.sinks.float().view(shape) - lse)
    return torch.where(lse == float("-inf"), 0.0, p * per_row)


def sink_grad(x: Inputs, lse: torch.Tensor, per_row: torch.Tensor) -> torch.Tensor:
    """-sum of exp(sink - lse) * per_row over the queries of each head, in sinks' dtype; empty rows give 0."""
    dims = (1,) if x.cu_seqlens_q is not None else (0, 2)
    return -_of_sinks(x, lse, per_row).sum(dims).to(x.sinks.dtype)  # type: ignore[union-attr]


def query_bias_grad(
    x: Inputs, lse: torch.Tensor, per_row: torch.Tensor, dlse: torch.Tensor | None = None
) -> torch.Tensor:
    """The gradient of a bias per query, in its dtype; per_row as in `sink_grad`.

    It shifts a row of scores as a whole, so that only lse and the share of the sink move: the row sums of dS are
    dlse + exp(sink - lse) * delta, those of E exp(sink - lse) * (u - delta * (g - ddsink)).
    """
    sums = torch.zeros_like(lse) if dlse is None else torch.where(lse == float("-inf"), 0.0, dlse)
    if x.sinks is not None:
        sums = sums + _of_sinks(x, lse, per_row)
    return reduce_to(sums[..., None], x.bias)  # type: ignore[arg-type]


def reduce_to(sums: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Sums of rows or columns (batch, heads, 1 or len_q, 1 or len_k) summed to a bias's shape, in its dtype."""
    return sum_to_bias(sums, bias).to(bias.dtype)


def broadcast_strides(bias: torch.Tensor | None) -> tuple[int, int, int, int]:
    """Strides of a 4-D bias, 0 along dimensions of size 1, and where there is none."""
    if bias is None:
        return 0, 0, 0, 0
    return tuple(0 if n == 1 else s for n, s in zip(bias.shape, bias.stride()))  # type: ignore[return-value]
