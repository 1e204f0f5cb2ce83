"""Which problems each attention backend takes; the reason in words for each that it does not."""

from __future__ import annotations

import torch

from adatom.ops.attention.problem import Problem


def reference(p: Problem) -> str | None:
    """The plain quadratic path takes everything."""
    return None


def torch_chunked(p: Problem) -> str | None:
    """Plain PyTorch in linear memory: everything that reaches it."""
    return None


def triton(p: Problem) -> str | None:
    """Triton kernels: CUDA from sm_80 up (or the interpreter), 16-bit and 32-bit floats, head_dim 8 to 256."""
    if p.device.kind == "cpu":
        return "needs a CUDA device (or TRITON_INTERPRET=1)"
    if p.device.kind == "cuda" and p.device.arch < 80:
        return f"needs compute capability 8.0 or newer; this is sm_{p.device.arch}"
    if p.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"takes float16, bfloat16 and float32; got {p.dtype}"
    if p.bias_dtype not in (None, torch.bool, torch.float16, torch.bfloat16, torch.float32):
        return f"takes a bias of bool, float16, bfloat16 or float32; got {p.bias_dtype}"
    for name, dim in (("head_dim", p.head_dim), ("v's head_dim", p.head_dim_v)):
        if dim % 8 or not 8 <= dim <= 256:
            return f"{name} must be a multiple of 8 from 8 to 256; got {dim}"
    return None


def one_tile(p: Problem) -> str | None:
    """One-tile kernels: at most 64 keys and 128 queries, head_dim up to 64."""
    if (why := triton(p)) is not None:
        return why
    if p.varlen:
        return "takes padded batches (kv_lens), not packed sequences"
    if p.seqlen_q > 128 or p.seqlen_k > 64:
        return "takes at most 128 queries and 64 keys"
    if max(p.head_dim, p.head_dim_v) > 64:
        return f"takes head_dim up to 64; got {p.head_dim}, v's {p.head_dim_v}"
    if p.bias == "full" and p.bias_grad and p.bias_shared:
        return "gives no gradient of a full bias that several (batch, head) share"
    return None


def one_tile_second(p: Problem) -> str | None:
    """The second derivative in one tile: where shared memory is small, not all of float32."""
    if (why := one_tile(p)) is not None:
        return why
    wide = max(p.head_dim, p.head_dim_v) > 32 and p.seqlen_k > 32 and p.dtype == torch.float32
    if wide and p.precision == "tf32x3" and p.device.kind == "cuda" and p.device.shared_memory < 148 * 1024:
        return f"tf32x3 beyond head_dim 32 and 32 keys needs 148 KB of shared memory; sm_{p.device.arch} has less"
    return None


def triton_second(p: Problem) -> str | None:
    """Triton kernels of the second derivative: where shared memory is small, not float32 at every head_dim."""
    if (why := triton(p)) is not None:
        return why
    wide = max(p.head_dim, p.head_dim_v) > 128 and p.dtype == torch.float32 and p.precision != "tf32"
    if wide and p.device.kind == "cuda" and p.device.shared_memory < 128 * 1024:
        return f"{p.precision} beyond head_dim 128 needs 128 KB of shared memory; sm_{p.device.arch} has less"
    return None
