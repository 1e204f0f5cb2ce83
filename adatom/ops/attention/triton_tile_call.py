"""What the launchers of the one-tile kernels share: how a problem is cut into programs, and where sums go."""

from __future__ import annotations

from math import gcd
from typing import Any

import torch

from adatom.ops.attention.problem import Inputs, Options, Remembered, empty
from adatom.ops.attention.triton_call import Call, Config, Configs, bias_grad, pick, reduce_to

TILE_NO_SPECIALIZE = ["heads", "left", "right", "len_q", "len_k"]
SMALL = 512  # bytes of the keys of a (batch, head) up to which a GPU begins programs too slowly for one each
MANY = 64  # programs for each multiprocessor from which on that counts: twice what one holds
PIECE = 2**22  # elements of the gradients of keys of each query head, at most, before heads that share them are summed
TileConfigs = dict[int, Configs]  # for each number of keys (a power of two) up to which they serve


class TileCall(Call):
    """One call as the one-tile kernels take it."""

    widens = False

    def __init__(self, x: Inputs, o: Options, name: str, tables: TileConfigs, most: int = 1) -> None:
        """most: how many small (batch, head) a program may own."""
        super().__init__(x, o)
        block_n = max(16, 1 << (self.len_k - 1).bit_length())
        self.config = pick(name, tables[block_n], self)._replace(block_n=block_n)
        tile_bytes = self.len_k * max(self.head_dim, self.head_dim_v) * x.q.element_size()
        small = tile_bytes <= SMALL and self.batch * self.heads >= MANY * self.device.sms
        self.per = gcd(self.batch * self.heads, most) if small else 1

    def program_count(self) -> int:
        """One program for `per` (batch, head)."""
        return self.batch * self.heads // self.per

    def numbers(self) -> tuple[Any, ...]:
        """heads, len_q, len_k, left, right, scale, softcap."""
        return self.heads, self.len_q, self.len_k, self.left, self.right, self.scale, self.o.softcap

    def constants(self, **more: Any) -> dict[str, Any]:
        """Constexprs and launch options."""
        meta = self.constexprs(self.config, SHARING=self.heads // max(self.kv_heads, 1), **more)
        meta["STEPS"] = -(-self.len_q // self.config.block_m)
        # probabilities carry a factor that fills the range of float16
        meta["CARRY"] = 16384.0 if meta["PRECISION"].startswith("fp16") else 1.0
        meta["SINKS"] = self.x.sinks is not None
        del meta["VARLEN"]
        return meta


def pieces(x: Inputs) -> list[tuple[Inputs, slice | None]]:
    """The batch in pieces, as Inputs and where they lie: None for all of it, unless heads share keys. There each query
    head's part of the gradients of k and v is written before those are summed, which for a large batch would fill the
    memory."""
    batch, heads, _, dim = x.q.shape
    each = max(16, PIECE // max(1, heads * x.k.shape[2] * dim) // 16 * 16)  # addresses stay multiples of 16 bytes
    if heads == x.k.shape[1] or each >= batch:
        return [(x, None)]
    found: list[tuple[Inputs, slice | None]] = []
    for start in range(0, batch, each):
        here = slice(start, min(start + each, batch))
        fields = {name: piece(t, here) for name, t in x._asdict().items() if name != "sinks"}
        cut = Inputs(**fields, sinks=x.sinks)
        found.append((Remembered.of(cut, x.memo) if isinstance(x, Remembered) else cut, here))
    return found


def piece(x: Any, here: slice | None) -> Any:
    """A piece of the batch of x, or all of it: where it is the same for all of the batch, or absent, too."""
    return x if here is None or x is None or x.shape[0] == 1 else x[here]


def of_each_head(x: Inputs, dk: torch.Tensor, dv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a kernel writes each query head's part of dk and dv: there, or where heads share keys, elsewhere, in
    float32."""
    if x.q.shape[1] == x.k.shape[1]:
        return dk, dv
    k, v = (empty((x.q.shape[0], x.q.shape[1], *t.shape[2:]), x.q, torch.float32) for t in (x.k, x.v))
    return k, v


def add_heads(parts: torch.Tensor, out: torch.Tensor) -> None:
    """Write the gradient of k or v, `out`, from what `of_each_head` gave to the kernel."""
    if parts is out:
        return
    parts = parts.unflatten(1, (out.shape[1], -1))
    if parts.dtype == out.dtype:
        torch.sum(parts, 2, out=out)
    else:
        out.copy_(parts.sum(2))


def side_of(x: Inputs, wanted: bool) -> torch.Tensor | None:
    """Where a kernel writes what becomes dbias: dbias itself, or sums of rows or columns in float32."""
    kind, _ = bias_grad(x, wanted)
    bias = x.bias
    if not kind:
        return None
    assert bias is not None
    whole = bias.shape[:2] == x.q.shape[:2]
    if kind == 1:
        return empty_like_contiguous(bias) if whole else empty((*x.q.shape[:2], 1, x.k.shape[2]), x.q, torch.float32)
    if kind == 2:
        return empty((*x.q.shape[:3], 1), x.q, torch.float32)
    return empty_like_contiguous(bias)


def empty_like_contiguous(x: torch.Tensor) -> torch.Tensor:
    """An unwritten contiguous tensor of x's shape and dtype."""
    return empty(tuple(x.shape), x)


def reduced(side: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor | None:
    """dbias from what `side_of` gave to the kernel."""
    if side is None or bias is None or (side.shape == bias.shape and side.dtype == bias.dtype):
        return side
    return reduce_to(side, bias)


def sink_rows(x: Inputs) -> torch.Tensor | None:
    """Where a kernel writes each row's share of dsinks, float32 (batch, heads, seqlen_q)."""
    return None if x.sinks is None else empty(tuple(x.q.shape[:3]), x.q, torch.float32)


def sink_sum(rows: torch.Tensor | None, x: Inputs) -> torch.Tensor | None:
    """dsinks from its rows."""
    return None if rows is None or x.sinks is None else rows.sum((0, 2)).to(x.sinks.dtype)


def tables(*tiles: Config) -> TileConfigs:
    """The tables of a kernel from its tiles for 16, 32, 64 and 128 keys on tensor cores: 16 queries a warp.

    On sm_100 tiles stay below 64 rows, those of its matrix unit, whose memory the parts of float32 overflow.
    """
    low = tuple(tile if tile.block_m < 64 else tile._replace(block_m=32, num_warps=2) for tile in tiles)

    def table(tile: Config) -> dict[tuple[str, int], Config]:
        lines = {(kind, 64): tile for kind in ("half", "tf32", "tf32x3")}
        return lines | {("ieee", 64): Config(16, 16, 4, 1, spill=8192)}

    return {
        keys: {family: table((low if family == 100 else tiles)[i]) for family in (80, 86, 90, 100)}
        for i, keys in enumerate((16, 32, 64, 128))
    }
