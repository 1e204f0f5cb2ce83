"""Sequences of different lengths without padding: packed tokens, by adatom's function and by flash-attn's."""

import torch

import adatom
from adatom.compat.flash_attn import flash_attn_varlen_func  # was: from flash_attn import flash_attn_varlen_func


def main() -> float:
    """Returns the largest difference between the packed batch and each sequence alone."""
    torch.manual_seed(0)
    lengths = [7, 1, 20, 12]
    q = torch.randn(sum(lengths), 8, 32)
    k, v = torch.randn(2, sum(lengths), 2, 32)  # 2 heads of keys serve 8 of queries
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()

    out = adatom.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, causal=True)
    same = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max(lengths), max(lengths), causal=True)
    assert torch.equal(out, same)

    worst = 0.0
    for start, end in zip(cu_seqlens[:-1], cu_seqlens[1:]):
        alone = adatom.attention(*(x[None, start:end].transpose(1, 2) for x in (q, k, v)), causal=True)
        worst = max(worst, (out[start:end] - alone[0].transpose(0, 1)).abs().max().item())
    print(f"{len(lengths)} sequences, {sum(lengths)} tokens, largest difference to each alone {worst:.1e}")
    return worst


if __name__ == "__main__":
    main()
