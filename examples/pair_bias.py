"""The attention blocks of AlphaFold3-style models (Boltz, Protenix, OpenFold) on adatom, beside their definition.

Triangle attention: every row of the pair representation z attends along itself, under a bias that all rows share.
Attention with pair bias: tokens attend under a bias from z, which several samples of one complex share (diffusion).
The bias is never repeated in memory, and its gradient is summed over those who share it inside the kernels.
"""

import math

import torch
from torch import nn

import adatom


def by_definition(q, k, v, bias, kv_lens=None):
    """softmax(q k^T / sqrt(head_dim) + bias) v, with every score in memory. kv_lens: keys that exist, at least one."""
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + bias
    if kv_lens is not None:
        hidden = torch.arange(k.shape[-2], device=k.device) >= kv_lens[..., None, None, None]
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v


class TriangleAttention(nn.Module):
    """z (batch, n, n, channels) -> the same. starting: rows attend; otherwise columns do (ending node)."""

    def __init__(self, channels: int, heads: int = 4, head_dim: int = 32, starting: bool = True) -> None:
        super().__init__()
        self.heads, self.starting = heads, starting
        self.norm = nn.LayerNorm(channels)
        self.qkvg = nn.Linear(channels, 4 * heads * head_dim, bias=False)
        self.bias = nn.Linear(channels, heads, bias=False)
        self.out = nn.Linear(heads * head_dim, channels, bias=False)

    def forward(self, z, lengths=None, attention=adatom.attention):
        """lengths: (batch,) tokens that exist; the rest is padding."""
        z = z if self.starting else z.transpose(1, 2)
        z = self.norm(z)
        qkvg = self.qkvg(z).unflatten(-1, (4, self.heads, -1)).transpose(2, 4)  # (batch, row, heads, 4, n, head_dim)
        q, k, v, g = qkvg.unbind(3)
        bias = self.bias(z).permute(0, 3, 1, 2)[:, None]  # (batch, 1, heads, n, n): all rows share it
        options = {} if lengths is None else {"kv_lens": lengths[:, None].expand(z.shape[:2]).contiguous()}
        out = attention(q, k, v, bias=bias, **options)
        out = self.out((out * g.sigmoid()).transpose(2, 3).flatten(3))
        return out if self.starting else out.transpose(1, 2)


class AttentionPairBias(nn.Module):
    """s (batch * samples, n, width), z (batch, n, n, channels) -> like s. The samples of one complex share its z."""

    def __init__(self, width: int, channels: int, heads: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkvg = nn.Linear(width, 4 * width, bias=False)
        self.bias = nn.Sequential(nn.LayerNorm(channels), nn.Linear(channels, heads, bias=False))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, s, z, attention=adatom.attention):
        qkvg = self.qkvg(self.norm(s)).unflatten(-1, (4, self.heads, -1)).transpose(1, 3)
        q, k, v, g = qkvg.unbind(2)  # (batch * samples, heads, n, head_dim)
        bias = self.bias(z).permute(0, 3, 1, 2)  # (batch, heads, n, n): each slice serves `samples` in a row
        return self.out((attention(q, k, v, bias=bias) * g.sigmoid()).transpose(1, 2).flatten(2))


def difference(block, *inputs, repeats: int = 1, **options) -> float:
    """Largest difference of the output and all gradients between adatom and the definition, over 1 + their norm.
    options: of the block, as `lengths`."""

    def dense(q, k, v, bias, **masks):
        return by_definition(q, k, v, bias.repeat_interleave(repeats, 0), **masks)

    results = []
    for attention in (adatom.attention, dense):
        out = block(*inputs, attention=attention, **options)
        wanted = [*inputs, *block.parameters()]
        results.append((out, *torch.autograd.grad(out.square().sum(), wanted)))
    return max(((a - b).norm() / (1 + b.norm())).item() for a, b in zip(*results))


def main() -> float:
    """Returns the largest difference of all blocks."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        z = torch.randn(2, 24, 24, 32, requires_grad=True)
        s = torch.randn(2 * 3, 24, 96, requires_grad=True)
        lengths = torch.tensor([24, 17])
        differences = {
            "triangle attention, starting node": difference(TriangleAttention(32), z),
            "triangle attention, ending node": difference(TriangleAttention(32, starting=False), z),
            "triangle attention, padded": difference(TriangleAttention(32), z, lengths=lengths),
            "triangle attention, ending node, padded": difference(
                TriangleAttention(32, starting=False), z, lengths=lengths
            ),
            "attention with pair bias, 3 samples": difference(AttentionPairBias(96, 32, 4), s, z, repeats=3),
        }
    finally:
        torch.set_default_dtype(torch.float32)
    for name, value in differences.items():
        print(f"{name}: {value:.1e} from its definition")
    return max(differences.values())


if __name__ == "__main__":
    main()
