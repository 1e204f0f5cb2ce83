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


def _narrow_values(p: Problem) -> str | None:
    """Tiles of v with 16 or 32 columns beside wider ones of q and k: under Triton 3.6, 64 beside 32 gave wrong results
    on an H100 in 16 bits. The general Triton kernels widen v's tile."""
    if p.device.kind != "cuda" or not p.head_dim_v <= 32 < p.head_dim or p.dtype == torch.float32:
        return None
    return f"not proven for v's head_dim up to 32 beside a larger one ({p.head_dim}): 64 and 32 went wrong on an H100"


def _head_dims(p: Problem, most: int = 256) -> str | None:
    for name, dim in (("head_dim", p.head_dim), ("v's head_dim", p.head_dim_v)):
        if dim % 8 or not 8 <= dim <= most:
            return f"{name} must be a multiple of 8 from 8 to {most}; got {dim}"
    return None


def _bias_dtype(p: Problem) -> str | None:
    if p.bias_dtype not in (None, torch.bool, torch.float16, torch.bfloat16, torch.float32):
        return f"takes a bias of bool, float16, bfloat16 or float32; got {p.bias_dtype}"
    return None


def triton(p: Problem) -> str | None:
    """Triton kernels: CUDA from sm_80 up (or the interpreter), 16-bit and 32-bit floats, head_dim 8 to 256."""
    if p.device.kind == "cpu":
        return "needs a CUDA device (or TRITON_INTERPRET=1)"
    if p.device.kind == "cuda" and p.device.arch < 80:
        return f"needs compute capability 8.0 or newer; this is sm_{p.device.arch}"
    if p.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"takes float16, bfloat16 and float32; got {p.dtype}"
    if (why := _bias_dtype(p) or _head_dims(p)) is not None:
        return why
    if p.bias == "full" and p.seqlen_k > 2**24:
        return "numbers the elements of a tile of a bias with 32 bits: takes up to 2^24 keys beside a full one"
    return None


def one_tile(p: Problem) -> str | None:
    """One-tile kernels: at most 64 keys (on Hopper 128, to head_dim 32) and 128 queries, head_dim up to 64."""
    if (why := triton(p)) is not None:
        return why
    if p.varlen:
        return "takes padded batches (kv_lens), not packed sequences"
    dim = max(p.head_dim, p.head_dim_v)
    if p.seqlen_q > 128 or p.seqlen_k > 128:
        return "takes at most 128 queries and 128 keys"
    if dim > 64:
        return f"takes head_dim up to 64; got {p.head_dim}, v's {p.head_dim_v}"
    slow = p.device.kind == "cuda" and (p.device.arch != 90 or p.dtype == torch.float32 and p.precision == "ieee")
    if p.seqlen_k > 64 and (dim > 32 or slow):
        return "takes more than 64 keys on Hopper's tensor cores only, and to head_dim 32"
    if p.bias == "full" and p.bias_grad and p.bias_shared:
        return "gives no gradient of a full bias that several (batch, head) share"
    if p.bias_repeated:
        return "does not take a bias whose slices serve several batch elements each"
    return _narrow_values(p)


def one_tile_second(p: Problem) -> str | None:
    """The second derivative in one tile: where shared memory is small, not all of float32."""
    if (why := one_tile(p)) is not None:
        return why
    wide = max(p.head_dim, p.head_dim_v) > 32 and p.seqlen_k > 32 and p.dtype == torch.float32
    if wide and p.precision == "ieee":
        return "lacks registers for ieee beyond head_dim 32 and 32 keys"
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


def short(p: Problem) -> str | None:
    """Few queries over many keys, where it was timed (docs/decode.md): 16, without a bias in 16 bits more."""
    if (why := triton(p)) is not None:
        return why
    if not (p.batch and p.heads and p.seqlen_q and p.seqlen_k):
        return "does not take empty tensors"
    if p.varlen and p.heads // p.kv_heads > 16:
        return "takes packed sequences of at most 16 query heads to a kv head"
    most = 4 if p.varlen else 16  # of packed sequences on average: long ones among them are slow here
    if not p.varlen and p.bias == "none" and p.dtype != torch.float32:
        most = 128 if p.batch * p.heads < 64 else 64 if max(p.head_dim, p.head_dim_v) > 64 else 16
    if p.seqlen_q > most * (p.batch if p.varlen else 1):
        return f"takes at most {most} queries of {'a packed sequence on average' if p.varlen else 'such problems'}"
    return None


def _hopper(p: Problem) -> str | None:
    """What all Gluon kernels for 16-bit floats need: sm_90, something to read, and by TMA."""
    if p.device.kind != "cuda" or p.device.arch != 90:
        return "needs a Hopper GPU (sm_90)"
    if p.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16; got {p.dtype}"
    if not (p.batch and p.heads and p.seqlen_q and p.seqlen_k):
        return "does not take empty tensors"
    if p.head_dim % 8 or p.head_dim_v % 8:  # which no strides mend
        return f"takes head_dims in multiples of 8; got {p.head_dim}, v's {p.head_dim_v}"
    if not p.tma:
        return "needs addresses and strides of q, k and v that are multiples of 16 bytes"
    return None


def _hopper_bias(p: Problem) -> str | None:
    """What those need that take a bias."""
    if (why := _bias_dtype(p)) is not None:
        return why
    if p.bias == "full" and not p.bias_tma:
        return "needs a bias with contiguous keys, and addresses and strides that are multiples of 16 bytes"
    return _narrow_values(p)


def hopper_fwd(p: Problem) -> str | None:
    """Gluon kernel of the forward: sm_90, 16-bit floats, what TMA can read; not where Triton's was measured as fast."""
    if (why := _hopper(p) or _head_dims(p) or _hopper_bias(p)) is not None:
        return why
    if p.bias_repeated:
        return "does not take a bias whose slices serve several batch elements each"
    return _hopper_fwd_slower(p)


def hopper_tile_fwd(p: Problem) -> str | None:
    """At most 128 queries and keys, head_dim 40 to 128: sm_90, 16-bit floats, what TMA can read, no bias."""
    if (why := _hopper(p) or _head_dims(p, 128)) is not None:
        return why
    if p.varlen or p.kv_lens or p.sinks or p.softcap or p.bias != "none":
        return "takes no packed sequences, kv_lens, sinks, softcap or bias"
    if p.seqlen_q > 128 or p.seqlen_k > 128:
        return "takes at most 128 queries and 128 keys"
    if p.head_dim != p.head_dim_v or not 32 < p.head_dim <= 128:
        return f"takes head_dims 40 to 128, q's and v's alike; got {p.head_dim}, v's {p.head_dim_v}"
    if p.batch * p.heads < 8 * p.device.sms:
        return f"has fewer than {8 * p.device.sms} heads in all, too few to repay tensor descriptors"
    if p.least_length < 64:
        return "computes tiles of 64 queries and keys, which is slow below 64"
    return None


def _hopper_fwd_slower(p: Problem) -> str | None:
    """Where Triton's forward was as fast or faster on an H100 (docs/hopper.md)."""
    dim, batch = max(p.head_dim, p.head_dim_v), 1 if p.varlen else p.batch
    if p.seqlen_q < 128:
        return "is not worth it for 64 queries or fewer"
    if batch * p.heads * (p.seqlen_q // 128) < (96 if dim <= 64 else 32 if dim <= 128 else 64):
        return "is not worth it for so few queries: they would occupy too little of the GPU"
    if dim <= 32:
        return "is not worth it for a head_dim of 32 or less"
    if p.varlen and dim <= 64 and p.least_length < 256:
        return "is not worth it for sequences of a few hundred tokens and a head_dim of 64 or less"
    if p.softcap and dim <= 128:
        return "is not worth it with softcap for a head_dim of 128 or less"
    if p.bias == "full" and p.bias_dtype == torch.float32 and dim > 64:
        return "is not worth it with a float32 bias for a head_dim above 64"
    return None


def hopper_deep_fwd(p: Problem) -> str | None:
    """The Gluon forward for head_dim 136 to 256, of v at most as wide in memory: sm_90, 16-bit floats."""
    if (why := hopper_fwd(p)) is not None:
        return why
    if not 128 < p.head_dim <= 256 or p.head_dim_v <= 64 or p.head_dim_v > (192 if p.head_dim <= 192 else 256):
        return f"takes head_dims 136 to 256, v's above 64 and to the next 192 or 256; got {p.head_dim}, {p.head_dim_v}"
    if p.bias != "none" or p.softcap:
        return "does not take a bias or a softcap"
    return None


def _shared_bias(p: Problem, least: int) -> str | None:
    """A full bias that many share, `least` batch elements or more, to head_dim 32: sm_90, what TMA reads, no masks.

    p.batch is rounded up: of `least` a little more than half will do, for which the kernels are as right."""
    if p.device.kind != "cuda" or p.device.arch != 90:
        return "needs a Hopper GPU (sm_90)"
    if p.bias != "full" or p.bias_dtype != p.dtype or not p.bias_shared:
        return "takes a full bias of q's dtype that several (batch, head) share"
    if any(d % 8 or not 8 <= d <= 32 for d in (p.head_dim, p.head_dim_v)):
        return f"head_dims must be multiples of 8 from 8 to 32; got {p.head_dim}, v's {p.head_dim_v}"
    if p.kv_heads != p.heads:
        return "takes as many heads of k and v as of q"
    if p.causal or p.window or p.softcap or p.sinks or p.kv_lens or p.varlen:
        return "takes no mask, softcap, sinks, kv_lens or packed sequences"
    if not p.tma or not p.bias_tma:
        return "needs contiguous keys of the bias, and addresses and strides that are multiples of 16 bytes"
    if p.least_length < 256 or p.batch < least or p.batch * p.heads * p.seqlen_q < 256 * p.device.sms:
        return f"is for {least} batch elements or more, 256 queries and keys or more, and enough to fill the GPU"
    return None


def hopper_shared_fwd(p: Problem) -> str | None:
    """The Gluon forward to head_dim 32 under a full bias that many share, in 16 bits."""
    if p.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16; got {p.dtype}"
    return _shared_bias(p, 8)


def hopper_float_fwd(p: Problem) -> str | None:
    """The Gluon forward to head_dim 32 under a full bias that many share, in float32."""
    if p.dtype != torch.float32 or p.precision != "tf32x3":
        return f'takes float32 of precision "tf32x3"; got {p.dtype}, {p.precision}'
    return _shared_bias(p, 16)


def _handed_on(p: Problem, most: int) -> str | None:
    """What a backward needs whose programs sum the gradient of the bias and hand dQ on to each other."""
    if not p.bias_grad:
        return "makes dQ along with the gradient of the bias, which nobody wants"
    return f"is for {1 << most.bit_length() - 1} keys or fewer" if p.seqlen_k > most else None  # lengths are rounded


def hopper_float_bwd(p: Problem) -> str | None:
    """The Gluon backward to head_dim 32 under a full bias that many share, with its gradient, in float32."""
    return hopper_float_fwd(p) or _handed_on(p, 128 * p.device.sms)  # a multiprocessor for 128 keys


def hopper_shared_bwd(p: Problem) -> str | None:
    """The Gluon backward to head_dim 32 under a full bias that many share, with its gradient."""
    return hopper_shared_fwd(p) or _handed_on(p, 32 * p.device.sms)  # a quarter of them: they wait in a ring


def hopper_bwd_any(p: Problem) -> str | None:
    """The Gluon backward: sm_90, 16-bit floats, head_dim 8 to 128, what TMA can read."""
    return _hopper(p) or _head_dims(p, 128) or _hopper_bias(p)


def _whole_heads(p: Problem) -> bool:
    """Whether programs of the Gluon backward take whole heads and sum dQ in shared memory."""
    return max(p.head_dim, p.head_dim_v) <= 32 and p.seqlen_q <= 512 and p.heads == p.kv_heads and not p.varlen


def _stored(p: Problem) -> bool:
    """Whether the Gluon backward stores dS, as the gradient of a bias, and may multiply dQ from that (unless keys are
    no multiple of 8, which rounded lengths do not tell)."""
    return p.bias == "full" and p.bias_dtype == p.dtype and p.bias_grad and not (p.bias_shared or p.softcap)


def hopper_bwd(p: Problem) -> str | None:
    """The Gluon backward where it was faster than Triton's (docs/hopper_backward.md, hopper_backward_bias.md)."""
    if (why := hopper_bwd_any(p)) is not None:
        return why
    dim, masked, heads, sms = max(p.head_dim, p.head_dim_v), p.causal or p.window, p.batch * p.heads, p.device.sms
    stored, wide = _stored(p), dim > 32 and p.bias == "none"
    least = (128 if dim > 32 else 512) if stored else 256 if wide else 512 if dim > 64 and not masked else 1024
    if _whole_heads(p):
        if 4 * heads < 3 * sms * -(-heads // sms):
            return f"gives programs whole heads, {heads} of which do not fill a GPU of {sms} multiprocessors"
        if min(p.seqlen_q, p.seqlen_k) < 256:
            return "computes tiles of 128 queries and keys, which is slow to 128 of either"
    elif p.varlen and p.least_length < (least := 256 if dim <= 64 else 128):
        return f"sums dQ in memory, which is slow for packed sequences of fewer than {least} tokens on average"
    elif not p.varlen and p.least_length < least:
        return f"is slow, or was not timed, at lengths below {least}"
    if p.window and p.window_keys <= 64:
        return "is slow under windows of 64 keys and below"
    if p.bias == "key" and p.bias_grad:
        return "lacks registers to sum the gradient of a bias per key"
    if p.bias in ("key", "full") and p.softcap:
        return "lacks registers for a softcap beside a bias"
    slow = not 32 < dim <= 64 or p.bias_grad and not p.bias_shared  # or not timed
    if p.bias == "full" and p.bias_dtype == torch.float32 and slow:
        return "has room for one tile of a float32 bias, and waits for each"
    few = 2 * sms // 3 if wide else 3 * sms // 2
    if 128 * (16 if stored or _few_suffice(p) else few) > _keys_of_all(p):
        return "has too few tiles of 128 keys for the GPU"
    return None


def _split(p: Problem) -> bool:
    """Whether the Gluon backward may split heads that share keys (`splits_of`, hopper_bwd_ways.py)."""
    return p.seqlen_k <= (p.seqlen_q if p.varlen else 2 * p.least_length)


def _keys_of_all(p: Problem) -> int:
    """Keys of all programs of the Gluon backward."""
    return (1 if p.varlen else p.batch) * (p.heads if _split(p) else p.kv_heads) * p.seqlen_k


def _few_suffice(p: Problem) -> bool:
    """Whether so few tiles that they do not fill the GPU were faster than Triton's: under a causal mask beyond
    head_dim 32, and without one, where they are more, each of a range of queries (`ranges_of`, hopper_bwd_ways.py)."""
    options = p.window or p.kv_lens or p.varlen or p.softcap or p.bias != "none"
    narrow, alone = max(p.head_dim, p.head_dim_v) <= 32, p.heads == p.kv_heads or _split(p)
    return p.least_length >= 1024 and alone and not (options or p.causal and narrow)


def _timetable(p: Problem) -> bool:
    """Whether few tiles without a mask have a timetable (hopper_bwd_ways.py) that was timed: if not all are there at
    once, half of a head's must have room to begin two blocks of queries apart."""
    dim = max(p.head_dim, p.head_dim_v)
    room = _keys_of_all(p) <= 128 * p.device.sms or p.seqlen_q * (1 if dim <= 64 else 2) >= p.seqlen_k
    return dim > 32 and p.least_length >= 1024 and not (p.kv_lens or p.varlen) and room


def hopper_bwd_ordered(p: Problem) -> str | None:
    """The Gluon backward that repeats bit for bit, where it was faster than Triton's (docs/hopper_backward.md)."""
    if (why := hopper_bwd(p)) is not None or _stored(p):
        return why
    convoy = p.kv_lens or p.varlen or p.seqlen_q > p.seqlen_k  # not upwards: some queries may see no keys
    if p.window and p.window_keys <= 256 and max(p.head_dim, p.head_dim_v) > 64 and convoy:
        return "adds to dQ in order, in a convoy, which takes too long under windows of 256 keys and below"
    served = p.causal or p.window or _timetable(p) or _few_suffice(p) or _whole_heads(p)
    if _keys_of_all(p) < 128 * (3 * p.device.sms // 2) and not served:
        return "adds to dQ in order, and without a mask has too few tiles of 128 keys for the GPU"
    return None


def hopper_deep_any(p: Problem) -> str | None:
    """The Gluon backward for head_dim 136 to 256: sm_90, 16-bit floats, what TMA can read; no bias."""
    if (why := _hopper(p)) is not None:
        return why
    dims = p.head_dim, p.head_dim_v
    if any(d % 8 for d in dims) or not 128 < max(dims) <= 256 or min(dims) <= 64:
        return f"takes head_dims above 64, one of them above 128, to 256, multiples of 8; got {dims[0]}, v's {dims[1]}"
    return "does not take a bias" if p.bias != "none" else None


def hopper_deep(p: Problem) -> str | None:
    """The Gluon backward for head_dim 136 to 256 where it was timed (docs/hopper.md)."""
    if (why := hopper_deep_any(p)) is not None:
        return why
    batch = 1 if p.varlen else p.batch
    if min(batch * p.kv_heads * p.seqlen_k, batch * p.heads * p.seqlen_q) < 2048:
        return "has fewer than 32 tiles of 64 keys or 16 of 128 queries, too few for the GPU"
    if p.varlen and p.least_length < 32:
        return "computes tiles of 64 keys and 128 queries, too many for packed sequences of fewer than 32 on average"
    return None
