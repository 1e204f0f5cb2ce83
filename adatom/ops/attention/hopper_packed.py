"""The tiles of packed sequences for the Hopper kernels: a table that the GPU makes of cu_seqlens."""

import triton
import triton.language as tl

from adatom.ops.attention.triton_call import Call
from adatom.tiles.launch import Launch
from adatom.tiles.triton import after_previous

HEADER = tl.constexpr(8)  # numbers of a line; the first line holds the number of tiles and a counter, at 0
_LINES = 128  # which a program writes at a time


@triton.jit
def _lengths(b, CuQ, CuK, n_sequences):
    """Queries and keys of sequences b, 0 of those that do not exist."""
    some = b < n_sequences
    len_q = tl.load(CuQ + b + 1, mask=some, other=0) - tl.load(CuQ + b, mask=some, other=0)
    len_k = tl.load(CuK + b + 1, mask=some, other=0) - tl.load(CuK + b, mask=some, other=0)
    return len_q.to(tl.int32), len_k.to(tl.int32)


@triton.jit(do_not_specialize=["n_sequences", "parts", "heads", "together", "least"])
def _table_kernel(Table, CuQ, CuK, n_sequences, parts, heads, together, least, KEYS: tl.constexpr,
                  LAST_FIRST: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr, BLOCK_Q: tl.constexpr,
                  LINES: tl.constexpr, SEQUENCES: tl.constexpr):
    """The lines of a sequence, one for each tile of each head; this program writes every parts-th LINES of them.

    A line: first row, first query token, first key token, queries, keys, number of the sequence's first block of
    BLOCK_Q queries (as in `tiles.triton.find_sequence`), head. The longest sequences come first. The heads of one go in
    groups, of about `together` queries in all, but at least `least` heads; of a group the first tiles of all heads come
    first, LAST_FIRST: the last ones.
    """
    after_previous(EARLY)
    pid = tl.program_id(0)
    b = pid // parts
    start_q, start_k = tl.load(CuQ + b).to(tl.int32), tl.load(CuK + b).to(tl.int32)
    len_q, len_k = _lengths(b, CuQ, CuK, n_sequences)
    length, work = (len_k, len_q) if KEYS else (len_q, len_k)
    before = tl.cast(0, tl.int32)  # tiles of a head of the sequences that come first
    count = before
    for start in range(0, n_sequences, SEQUENCES):
        other = start + tl.arange(0, SEQUENCES)
        other_q, other_k = _lengths(other, CuQ, CuK, n_sequences)
        tiles = tl.cdiv(other_k if KEYS else other_q, BLOCK)
        works = other_q if KEYS else other_k
        first = (works > work) | ((works == work) & (other < b))
        before += tl.sum(tl.where(first, tiles, 0), 0)
        count += tl.sum(tiles, 0)
    if pid == 0:
        tl.store(Table, count * heads)
        tl.store(Table + 1, 0)
    tiles = tl.cdiv(length, BLOCK)
    group = tl.minimum(tl.maximum(together // tl.maximum(len_q, 1), least), heads)
    column = tl.arange(0, HEADER)[None, :]
    Table += (before.to(tl.int64) * heads + 1) * HEADER
    for start in range(pid % parts * LINES, tiles * heads, parts * LINES):
        line = tl.minimum(start + tl.arange(0, LINES), tiles * heads - 1)  # the last one is written often
        i = line // (group * tiles) * group
        r = line - i * tiles
        size = tl.minimum(group, heads - i)
        block = r // size
        h = i + r - block * size
        if LAST_FIRST:
            block = tiles - 1 - block
        of_all = tl.where(column == 1, start_q, tl.where(column == 2, start_k, tl.where(column == 3, len_q, len_k)))
        of_all = tl.where(column == 5, start_q // BLOCK_Q + b, of_all)
        x = tl.where(column == 0, (block * BLOCK)[:, None], tl.where(column == 6, h[:, None], of_all))
        tl.store(Table + line[:, None] * HEADER + column, x)


def table_size(call: Call, block: int, kv: bool = False) -> int:
    """Numbers of a table of tiles of `block` queries, or keys, of each (kv) head."""
    return (call.programs(call.len_k if kv else call.len_q, block, kv) + 1) * HEADER.value


def table_launch(
    call: Call, block: int, together: int, least: int = 1, kv: bool = False, block_q: int = 1
) -> Launch:
    """The launch that fills a table, given it, cu_seqlens_q and cu_seqlens_k. together, least: how many heads of a
    sequence go together, see `_table_kernel`."""
    heads = call.kv_heads if kv else call.heads
    parts = max(1, call.device.sms // max(call.batch, 1))
    meta = {
        "KEYS": kv, "LAST_FIRST": not kv and call.right >= 0, "EARLY": True, "BLOCK": block, "BLOCK_Q": block_q,
        "LINES": _LINES, "SEQUENCES": 128 if call.batch <= 128 else 1024, "num_warps": 4, "launch_pdl": True,
    }  # fmt: skip
    scalars = (call.batch, parts, heads, together, least)
    return Launch(_table_kernel, call.batch * parts, scalars, meta)
