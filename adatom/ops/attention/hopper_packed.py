"""The tiles of packed sequences for the Hopper kernels: a table that the GPU makes of cu_seqlens."""

import triton
import triton.language as tl

from adatom.ops.attention.triton_call import Call
from adatom.tiles.launch import Launch
from adatom.tiles.triton import after_previous

HEADER = tl.constexpr(8)  # numbers of a line; the first line holds the number of tiles
_SLOTS = 64


@triton.jit
def _lengths(b, CuQ, CuK, n_sequences):
    """Queries and keys of sequences b, 0 of those that do not exist."""
    some = b < n_sequences
    len_q = tl.load(CuQ + b + 1, mask=some, other=0) - tl.load(CuQ + b, mask=some, other=0)
    len_k = tl.load(CuK + b + 1, mask=some, other=0) - tl.load(CuK + b, mask=some, other=0)
    return len_q.to(tl.int32), len_k.to(tl.int32)


@triton.jit(do_not_specialize=["n_slots", "n_sequences", "steps", "heads", "together", "least"])
def _table_kernel(Table, CuQ, CuK, n_slots, n_sequences, steps, heads, together, least, KEYS: tl.constexpr,
                  LAST_FIRST: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr, BLOCK_Q: tl.constexpr,
                  SLOTS: tl.constexpr):
    """Of some slots of tiles and a head: their lines (first row, first query token, first key token, queries, keys,
    number of the sequence's first block of BLOCK_Q queries, head).

    Sequence b owns the slots from Cu[b] // BLOCK + b, as in `tiles.triton.find_sequence`: at least as many as it has
    tiles. The longest sequences come first. The heads of one go in groups, of about `together` queries in all, but
    at least `least` heads; of a group the first tiles of all heads come first, LAST_FIRST: the last ones.
    """
    after_previous(EARLY)
    pid = tl.program_id(0)
    h = pid % heads
    slot = pid // heads * SLOTS + tl.arange(0, SLOTS)
    Cu = CuK if KEYS else CuQ
    b = slot * 0
    end = b + n_sequences
    for _ in range(steps):  # the last sequence whose slots begin at this one or before
        middle = (b + end) // 2
        after = tl.load(Cu + middle).to(tl.int32) // BLOCK + middle <= slot
        b = tl.where(after, middle, b)
        end = tl.where(after, end, middle)
    start_q, start_k = tl.load(CuQ + b).to(tl.int32), tl.load(CuK + b).to(tl.int32)
    len_q, len_k = _lengths(b, CuQ, CuK, n_sequences)
    length, work = (len_k, len_q) if KEYS else (len_q, len_k)
    row = (slot - ((start_k if KEYS else start_q) // BLOCK + b)) * BLOCK
    before = slot * 0  # tiles of a head of the sequences that come first
    count = tl.cast(0, tl.int32)
    for start in range(0, n_sequences, SLOTS):
        other = start + tl.arange(0, SLOTS)
        other_q, other_k = _lengths(other, CuQ, CuK, n_sequences)
        tiles = tl.cdiv(other_k if KEYS else other_q, BLOCK)
        works = (other_q if KEYS else other_k)[None, :]
        first = (works > work[:, None]) | ((works == work[:, None]) & (other[None, :] < b[:, None]))
        before += tl.sum(tl.where(first, tiles[None, :], 0), 1)
        count += tl.sum(tiles, 0)
    if pid == 0:
        tl.store(Table, count * heads)
    tiles = tl.cdiv(length, BLOCK)
    group = tl.minimum(tl.maximum(together // tl.maximum(len_q, 1), least), heads)
    i = h // group * group
    block = row // BLOCK
    if LAST_FIRST:
        block = tiles - 1 - block
    line = before * heads + i * tiles + block * tl.minimum(group, heads - i) + h - i
    at = Table + (line.to(tl.int64) + 1) * HEADER
    there = (slot < n_slots) & (row < length)
    tl.store(at, row, mask=there)
    tl.store(at + 1, start_q, mask=there)
    tl.store(at + 2, start_k, mask=there)
    tl.store(at + 3, len_q, mask=there)
    tl.store(at + 4, len_k, mask=there)
    tl.store(at + 5, start_q // BLOCK_Q + b, mask=there)
    tl.store(at + 6, slot * 0 + h, mask=there)


def table_size(call: Call, block: int, kv: bool = False) -> int:
    """Numbers of a table of tiles of `block` queries, or keys, of each (kv) head."""
    return (call.programs(call.len_k if kv else call.len_q, block, kv) + 1) * HEADER.value


def table_launch(
    call: Call, block: int, together: int, least: int = 1, kv: bool = False, block_q: int = 1
) -> Launch:
    """The launch that fills a table, given it, cu_seqlens_q and cu_seqlens_k. together, least: how many heads of a
    sequence go together, see `_table_kernel`."""
    heads = call.kv_heads if kv else call.heads
    n_slots = (call.len_k if kv else call.len_q) // block + call.batch
    meta = {
        "KEYS": kv, "LAST_FIRST": not kv and call.right >= 0, "EARLY": True, "BLOCK": block, "BLOCK_Q": block_q,
        "SLOTS": _SLOTS, "num_warps": 4, "launch_pdl": True,
    }  # fmt: skip
    scalars = (n_slots, call.batch, call.batch.bit_length(), heads, together, least)
    return Launch(_table_kernel, -(-n_slots // _SLOTS) * heads, scalars, meta)
