"""Which cases of attention there are: read by the tests, verify, bench and compile.

SMALL: tiny cases that together touch every option; seconds on a CPU, Triton's interpreter included.
GPU, and QUICK among them: the same ideas at lengths that fill many tiles, every head_dim bucket, large batches, over
2**31 elements.
BENCH, BENCH_CPU: groups of cases to time. Those to compile are in trial.py.
"""

from __future__ import annotations

from typing import Any

import torch

from adatom.ops.attention.case import BF16, F16, F32, F64, Case, bytes_moved, call, flops, make

__all__ = ["BENCH", "BENCH_CPU", "GPU", "KINDS", "QUICK", "SMALL", "kind_of"]
__all__ += ["BF16", "F16", "F32", "F64", "Case", "bytes_moved", "call", "flops", "make"]


def _square(name: str, b: int, h: int, s: int, d: int, dtype: torch.dtype, *more: Any, **options: Any) -> Case:
    return Case(name, b, h, options.pop("kv_heads", h), s, options.pop("seqlen_k", s), d, d, dtype, *more, **options)


_ALL: dict[str, Any] = {"causal": True, "softcap": 5.0, "sinks": True, "kv_lens": True, "scale": 0.4}

SMALL: tuple[Case, ...] = (
    # dtypes and precisions
    Case("plain f32", 1, 1, 1, 33, 33, 16, 16, F32),
    Case("plain f32 ieee", 1, 1, 1, 17, 33, 16, 16, F32, "ieee"),
    Case("plain f32 tf32", 1, 1, 1, 33, 17, 32, 32, F32, "tf32"),
    Case("plain f16", 1, 2, 2, 32, 32, 16, 16, F16),
    Case("plain bf16", 1, 2, 1, 17, 47, 32, 32, BF16),
    Case("plain f64", 1, 2, 1, 19, 23, 16, 8, F64, bias="1hqk", causal=True, sinks=True),
    # dims
    Case("dims 24 and 8", 1, 1, 1, 20, 18, 24, 8, F32),
    Case("dims 8 and 40 bshd", 1, 2, 2, 9, 35, 8, 40, BF16, layout="bshd"),
    Case("dims 64 and 24", 1, 1, 1, 16, 16, 64, 24, F32, causal=True),
    Case("rows apart f32", 2, 2, 1, 19, 35, 24, 16, F32, bias="1hqk", layout="apart"),
    Case("rows apart bf16", 1, 2, 2, 33, 20, 16, 16, BF16, layout="apart"),
    # lengths
    Case("one query", 2, 2, 1, 1, 37, 16, 16, F32, causal=True, kv_lens=True),
    Case("one key", 2, 1, 1, 21, 1, 8, 8, F32),
    Case("causal, fewer queries", 1, 2, 2, 13, 41, 16, 16, F32, causal=True),
    Case("causal, rows with nothing", 1, 2, 1, 41, 13, 16, 16, F32, causal=True),
    Case("causal, rows with nothing f16", 1, 1, 1, 40, 24, 16, 16, F16, causal=True, sinks=True),
    # heads
    Case("gqa bshd", 1, 6, 2, 17, 19, 16, 16, F32, layout="bshd", causal=True),
    Case("mqa f16", 1, 4, 1, 16, 33, 16, 16, F16),
    # windows, softcap, sinks, scale
    Case("window left", 1, 1, 1, 35, 35, 16, 16, F32, window=(7, None)),
    Case("window both", 1, 2, 2, 35, 29, 16, 16, F32, window=(5, 3)),
    Case("window causal bf16", 1, 2, 1, 24, 40, 16, 16, BF16, causal=True, window=(9, 0)),
    Case("softcap", 1, 2, 2, 18, 33, 16, 16, F32, softcap=3.0, magnitude=4.0),
    Case("softcap causal bf16", 1, 1, 1, 33, 33, 16, 16, BF16, softcap=2.0, causal=True),
    Case("sinks", 2, 2, 1, 9, 20, 16, 16, F32, sinks=True),
    Case("sinks f16, f32 sinks", 1, 2, 2, 20, 18, 16, 16, F16, sinks=True, bias_dtype=F32),
    Case("negative scale", 1, 1, 1, 20, 33, 16, 16, F32, scale=-0.3),
    Case("zero scale", 1, 1, 1, 12, 17, 8, 8, F32, scale=0.0, bias="11qk"),
    # large scores
    Case("large scores f32", 1, 2, 2, 33, 33, 16, 16, F32, magnitude=20.0),
    Case("large scores bf16", 1, 1, 1, 24, 40, 16, 16, BF16, magnitude=8.0, causal=True),
    # biases: every shape, masks
    Case("bias bhqk", 2, 2, 1, 17, 20, 16, 16, F32, bias="bhqk"),
    Case("bias 1hqk", 2, 2, 2, 15, 33, 16, 16, F32, bias="1hqk"),
    Case("bias 1hqk bf16", 3, 2, 1, 17, 19, 16, 16, BF16, bias="1hqk", causal=True),
    Case("bias b1qk", 2, 2, 2, 19, 18, 16, 16, F32, bias="b1qk"),
    Case("bias 11qk f16", 2, 2, 1, 16, 20, 16, 16, F16, bias="11qk", layout="bshd"),
    Case("bias 11qk, no gradient", 2, 2, 1, 18, 20, 16, 16, F32, bias="11qk", bias_grad=False),
    Case("bias b11k", 2, 2, 2, 17, 14, 16, 16, F32, bias="b11k"),
    Case("bias bh1k bf16, f32 bias", 2, 2, 1, 18, 16, 16, 16, BF16, bias="bh1k", bias_dtype=F32),
    Case("bias 2hqk", 4, 2, 1, 13, 17, 16, 16, F32, bias="2hqk", causal=True),
    Case("bias 21qk bf16", 6, 2, 2, 9, 20, 16, 16, BF16, bias="21qk"),
    Case("bias 2h1k", 4, 2, 2, 7, 12, 16, 16, F32, bias="2h1k"),
    Case("bias 21q1", 6, 2, 2, 7, 12, 16, 16, F32, bias="21q1", sinks=True),
    Case("bias 1h1k", 2, 2, 2, 13, 19, 16, 16, F32, bias="1h1k", sinks=True),
    Case("bias bhq1", 2, 2, 1, 18, 15, 16, 16, F32, bias="bhq1", sinks=True),
    Case("bias 1h11", 2, 2, 2, 17, 20, 16, 16, F32, bias="1h11", sinks=True),
    Case("bias bh11", 2, 2, 2, 3, 5, 8, 8, F32, bias="bh11", sinks=True),
    Case("bias bhqk -inf", 1, 2, 2, 21, 35, 16, 16, F32, bias="bhqk-inf"),
    Case("bias bhqk -far", 1, 2, 2, 21, 35, 16, 16, F32, bias="bhqk-far"),
    Case("bias 1hqk -inf sinks bf16", 2, 2, 2, 18, 17, 16, 16, BF16, bias="1hqk-inf", sinks=True),
    Case("bias b1qk bool", 2, 2, 1, 18, 17, 16, 16, F32, bias="b1qk-bool"),
    Case("bias b11k bool f16", 2, 1, 1, 17, 19, 16, 16, F16, bias="b11k-bool", causal=True),
    # ragged
    Case("kv_lens", 3, 2, 1, 11, 35, 16, 16, F32, kv_lens=True),
    Case("kv_lens causal bf16", 3, 1, 1, 20, 20, 16, 16, BF16, kv_lens=True, causal=True),
    Case("kv_lens bias window", 3, 2, 2, 17, 18, 16, 16, F32, kv_lens=True, bias="1hqk", window=(6, 2)),
    Case("varlen", 4, 2, 2, 20, 20, 16, 16, F32, varlen=True),
    Case("varlen causal gqa bf16", 5, 2, 1, 19, 35, 16, 16, BF16, varlen=True, causal=True),
    Case("varlen everything", 4, 2, 1, 33, 21, 16, 8, F32, varlen=True, window=(9, 4), softcap=3.0, sinks=True),
    # everything at once
    Case("everything", 3, 2, 1, 21, 35, 24, 16, F32, bias="1hqk", window=(20, None), layout="bshd", **_ALL),
    Case("everything f16", 2, 4, 1, 17, 33, 16, 24, F16, bias="b1qk-inf", causal=True, softcap=4.0, sinks=True),
)

KINDS: tuple[tuple[torch.dtype, str | None], ...] = (
    (BF16, None),
    (F16, None),
    (F32, "tf32x3"),
    (F32, "tf32"),
    (F32, "ieee"),
)
_STORED = (128, 16, 1024), (128, 2, 704), (32, 2, 656)  # head_dim, heads of keys, queries
_RANGES = (32, 24, 4, 2030, F16), (64, 56, 2, 4050, BF16), (96, 128, 2, 4240, BF16), (128, 96, 4, 1020, F16)
_DIMS = (*((d, d) for d in (16, 32, 40, 64, 80, 96, 128, 160, 192, 256)), (192, 128), (40, 24), (128, 32), (192, 16))


def kind_of(dtype: torch.dtype, precision: str | None) -> str:
    return precision or {F16: "f16", BF16: "bf16"}[dtype]


_MOST: dict[str, Any] = {"bias": "1hqk", "causal": True, "window": (200, None), "sinks": True, "kv_lens": True}
_MOST |= {"scale": 0.2, "layout": "bshd"}
_FILLED: tuple[tuple[str, int, tuple[int, int], int, torch.dtype, dict[str, Any]], ...] = (
    ("window", 4, (777, 777), 64, BF16, {"window": (100, None), "causal": True}),
    ("window both", 2, (777, 600), 128, F16, {"window": (65, 31)}),
    ("window misses tiles", 2, (600, 900), 128, BF16, {"window": (3, 2)}),
    ("softcap", 4, (333, 421), 256, BF16, {"softcap": 3.0, "magnitude": 4.0}),
    ("sinks", 2, (333, 421), 64, BF16, {"sinks": True, "causal": True, "window": (128, None)}),
    ("negative scale", 4, (333, 421), 64, BF16, {"scale": -0.2}),
    ("large scores", 4, (333, 421), 64, F16, {"magnitude": 12.0, "causal": True}),
    ("rows with nothing", 2, (421, 133), 64, BF16, {"causal": True}),
    ("one key", 2, (333, 1), 64, F16, {}),
    ("bshd", 2, (333, 333), 64, F16, {"layout": "bshd", "causal": True}),
    ("three consumers", 2, (1100, 1300), 64, F16, {"sinks": True}),
    ("three consumers, kv_lens", 2, (1100, 1300), 64, F16, {"kv_lens": True}),
    ("kv_lens", 2, (333, 421), 128, BF16, {"kv_lens": True, "causal": True}),
    ("kv_lens 256", 2, (333, 421), 256, F16, {"kv_lens": True, "window": (150, 20)}),
    *(
        (f"bias {bias} {d}", 2, (333, 432), d, dtype, {"bias": bias, "bias_dtype": bias_dtype, **more})
        for bias, d, dtype, bias_dtype, more in (
            ("bhqk", 64, BF16, None, {}),
            ("1hqk", 128, BF16, None, {"causal": True}),
            ("b1qk", 40, F16, None, {"sinks": True}),
            ("11qk", 64, BF16, F32, {"causal": True}),
            ("bhqk-inf", 128, F16, BF16, {"layout": "bshd"}),
            ("1hqk-far", 64, BF16, None, {"window": (100, 60)}),
            ("b1qk-bool", 128, BF16, None, {}),
            ("11qk-bool", 96, F16, None, {"causal": True}),
            ("bh1k", 64, BF16, None, {"causal": True}),
            ("b11k-bool", 128, BF16, None, {}),
            ("bhq1", 64, F16, F32, {"sinks": True}),
            ("b1qk", 128, BF16, None, {"kv_lens": True, "causal": True}),
            ("bhqk", 256, BF16, None, {}),
            ("bhqk", 128, F16, None, {"causal": True}),
            ("bhqk", 48, F16, None, {"kv_lens": True, "window": (150, 40)}),
            ("bhqk", 80, BF16, None, {"softcap": 4.0}),
            ("bhqk", 96, BF16, F32, {}),
            ("2hqk", 64, F16, None, {"causal": True}),
            ("2h1k", 96, BF16, None, {"softcap": 4.0}),
            ("bh1k", 128, F16, F32, {"kv_lens": True}),
            ("bhq1-bool", 128, BF16, None, {"sinks": True}),
            ("b1q1-far", 40, BF16, None, {"causal": True}),
        )
    ),
)
_PACKED: tuple[tuple[str, int, int, tuple[int, int], int, int, dict[str, Any]], ...] = (
    ("64", 9, 8, (900, 900), 64, 64, {}),
    ("64 causal", 9, 2, (1000, 1000), 64, 64, {"causal": True, "sinks": True}),
    ("128", 7, 4, (700, 1000), 128, 128, {"sinks": True}),
    ("128 causal", 9, 8, (900, 900), 128, 128, {"causal": True}),
    ("128 bottom right", 9, 8, (800, 700), 128, 80, {"causal": True}),
    ("64 window", 9, 4, (900, 700), 48, 64, {"window": (500, 30)}),
    ("128 window", 3, 4, (1200, 1200), 128, 128, {"window": (300, None), "causal": True}),
    ("256 causal", 9, 4, (700, 700), 256, 192, {"causal": True}),
    ("short", 99, 8, (150, 150), 64, 64, {"causal": True}),
    ("three consumers", 1, 2, (3300, 3300), 64, 40, {"causal": True}),
    ("few", 70, 2, (4, 1500), 128, 128, {"causal": True}),
    ("few, window", 33, 1, (3, 900), 64, 40, {"causal": True, "window": (500, None), "sinks": True}),
    ("192", 9, 8, (1100, 900), 192, 192, {"sinks": True}),
    ("192 and 128 causal", 9, 2, (900, 900), 192, 128, {"causal": True}),
    ("192 and 128 bottom right", 9, 8, (700, 901), 192, 128, {"causal": True, "sinks": True}),
    ("256 causal, deep", 7, 4, (1000, 1000), 256, 256, {"causal": True}),
    ("256 window", 9, 1, (777, 700), 256, 256, {"window": (200, 60)}),
    ("136x72 window", 9, 8, (800, 800), 136, 72, {"window": (300, None), "causal": True, "softcap": 5.0}),
    ("short 200x256", 99, 8, (150, 150), 200, 256, {"causal": True}),
)
_FEW: tuple[tuple[str, tuple[int, int, int], tuple[int, int], int, torch.dtype, dict[str, Any]], ...] = (
    ("plain", (3, 8, 8), (1, 1333), 64, BF16, {}),
    ("gqa", (5, 32, 4), (4, 2049), 128, BF16, {"causal": True, "layout": "bshd"}),
    ("mqa, kv_lens", (9, 16, 1), (3, 3000), 128, F16, {"causal": True, "kv_lens": True}),
    ("kv_lens", (40, 8, 8), (1, 5000), 128, BF16, {"kv_lens": True, "sinks": True}),
    ("two tiles", (2, 8, 1), (11, 2500), 64, BF16, {"causal": True, "kv_lens": True}),
    ("64 queries", (1, 4, 4), (64, 8000), 128, BF16, {"causal": True}),
    ("100 queries", (1, 4, 2), (100, 3000), 64, F16, {"causal": True, "sinks": True}),
    ("seven tiles", (8, 16, 2), (50, 1500), 128, BF16, {"causal": True, "kv_lens": True}),
    ("many", (50, 8, 8), (1, 2100), 128, BF16, {}),
    ("window", (4, 16, 2), (5, 4000), 128, BF16, {"causal": True, "window": (700, None), "sinks": True}),
    ("window both", (2, 8, 2), (16, 900), 64, F16, {"window": (100, 50)}),
    ("softcap", (3, 8, 2), (7, 1500), 96, BF16, {"softcap": 3.0, "sinks": True, "kv_lens": True, "magnitude": 4.0}),
    ("large scores", (2, 8, 2), (4, 4100), 128, F16, {"magnitude": 12.0}),
    ("bias bhqk", (2, 8, 2), (8, 1200), 128, BF16, {"bias": "bhqk"}),
    ("bias bh1k", (3, 8, 2), (4, 1303), 64, BF16, {"bias": "bh1k", "bias_dtype": F32, "kv_lens": True}),
    ("bias b11k -far", (3, 8, 1), (2, 1500), 128, BF16, {"bias": "b11k-far", "causal": True}),
    ("bias 2hqk -inf", (4, 8, 4), (9, 1400), 40, F16, {"bias": "2hqk-inf", "sinks": True}),
    ("bias b1qk bool", (2, 4, 4), (3, 1111), 80, BF16, {"bias": "b1qk-bool", "window": (900, 20)}),
    ("bias 1h1k", (4, 8, 8), (1, 1600), 128, BF16, {"bias": "1h1k"}),
    ("256", (3, 8, 1), (8, 1111), 256, BF16, {"causal": True}),
    ("rows apart", (2, 8, 4), (5, 1000), 72, BF16, {"layout": "apart", "bias": "1hqk"}),
    ("tf32x3 64", (2, 8, 2), (4, 1500), 64, F32, {"causal": True, "kv_lens": True}),
    ("tf32x3 128", (2, 4, 2), (16, 900), 128, F32, {"bias": "bhqk"}),
    ("tf32x3 256", (1, 4, 1), (5, 700), 256, F32, {"sinks": True}),
    ("tf32 128", (2, 8, 2), (5, 1100), 128, F32, {"precision": "tf32", "softcap": 4.0}),
    ("ieee 96", (2, 8, 2), (3, 900), 96, F32, {"precision": "ieee", "window": (500, None), "causal": True}),
)

GPU: tuple[Case, ...] = (
    *(
        Case(f"{kind_of(*kind)} {d}x{dv}", 2, 2, 2, 333, 421, d, dv, *kind, causal=i % 2 == 1)
        for kind in (KINDS[0], KINDS[2])
        for i, (d, dv) in enumerate(_DIMS)
    ),
    *(
        Case(f"{kind_of(*kind)} {d}", 1, 4, 2, 256, 320, d, d, *kind, causal=i % 2 == 0)
        for kind in (KINDS[1], KINDS[3], KINDS[4])
        for i, d in enumerate((32, 64, 128, 256))
    ),
    Case("dims 8", 2, 2, 2, 129, 255, 8, 8, BF16),
    Case("dims 8 and 256 f32", 1, 2, 1, 130, 127, 8, 256, F32, causal=True),
    Case("square 1024", 2, 8, 8, 1024, 1024, 64, 64, BF16),
    Case("square 1024 causal", 2, 8, 2, 1024, 1024, 128, 128, BF16, causal=True),
    Case("square 512 f32", 2, 4, 4, 512, 512, 64, 64, F32),
    Case("long keys", 1, 2, 1, 96, 4096, 64, 64, BF16, causal=True),
    Case("one query", 4, 8, 2, 1, 2049, 128, 128, BF16, kv_lens=True, causal=True),
    Case("one key", 2, 2, 2, 333, 1, 64, 64, F16),
    Case("rows with nothing", 1, 4, 2, 421, 133, 64, 64, BF16, causal=True),
    Case("rows with nothing f32", 1, 2, 2, 421, 133, 64, 64, F32, causal=True, sinks=True),
    Case("bshd gqa", 2, 8, 2, 333, 333, 64, 64, F16, layout="bshd", causal=True),
    Case("parts f16", 2, 16, 2, 900, 777, 72, 128, F16, causal=True, kv_lens=True),
    Case("parts f16, packed", 5, 16, 2, 700, 700, 128, 96, F16, causal=True, varlen=True),
    Case("rows apart", 2, 4, 2, 384, 320, 64, 64, BF16, layout="apart", bias="1hqk"),
    Case("window", 2, 4, 4, 777, 777, 64, 64, BF16, window=(100, None), causal=True),
    Case("window both f32", 1, 4, 2, 333, 421, 64, 64, F32, window=(65, 31)),
    Case("window misses tiles", 1, 2, 2, 600, 900, 128, 128, BF16, window=(3, 2)),
    Case("softcap", 1, 4, 4, 333, 421, 64, 64, BF16, softcap=3.0, magnitude=4.0),
    Case("softcap f32", 1, 4, 2, 333, 421, 64, 64, F32, softcap=3.0, magnitude=4.0, causal=True),
    Case("sinks", 2, 4, 2, 333, 421, 64, 64, BF16, sinks=True, causal=True, window=(128, None)),
    Case("sinks f32", 2, 4, 2, 333, 421, 32, 32, F32, sinks=True),
    Case("negative scale", 1, 2, 2, 333, 421, 64, 64, BF16, scale=-0.2),
    Case("large scores bf16", 1, 4, 4, 333, 421, 64, 64, BF16, magnitude=8.0),
    Case("large scores f16", 1, 4, 4, 333, 421, 64, 64, F16, magnitude=12.0, causal=True),
    Case("large scores f32", 1, 4, 4, 333, 421, 64, 64, F32, magnitude=20.0),
    Case("large scores tf32", 1, 4, 4, 333, 421, 64, 64, F32, "tf32", magnitude=8.0),
    *(
        Case(f"bias {bias}", 2, 4, 2, 333, 421, 64, 64, BF16, bias=bias, causal=i % 2 == 1)
        for i, bias in enumerate(("bhqk", "1hqk", "b1qk", "11qk", "b11k", "bh1k", "1h1k", "bhq1", "1h11", "bh11"))
    ),
    *(
        Case(f"bias {bias} f32", 2, 4, 4, 129, 257, 32, 32, F32, bias=bias)
        for bias in ("bhqk", "1hqk", "b11k", "bhq1", "1hqk-inf", "b1qk-bool")
    ),
    Case("bias 1hqk many", 64, 4, 4, 128, 136, 32, 32, BF16, bias="1hqk"),
    Case("bias 2hqk", 12, 4, 4, 200, 264, 32, 32, BF16, bias="2hqk"),
    Case("bias 21qk f32", 6, 4, 2, 133, 200, 48, 48, F32, bias="21qk", kv_lens=True),
    Case("bias 1hqk f32 bias", 4, 4, 4, 256, 256, 32, 32, BF16, bias="1hqk", bias_dtype=F32),
    Case("bias bhqk -inf", 2, 4, 2, 333, 421, 64, 64, BF16, bias="bhqk-inf", sinks=True),
    Case("bias 1hqk, no gradient", 2, 4, 4, 333, 421, 64, 64, BF16, bias="1hqk", bias_grad=False),
    Case("bias bhqk -far", 2, 4, 2, 333, 421, 64, 64, BF16, bias="bhqk-far"),
    *(Case(f"bias 1hqk {b} f16", 2, 4, 4, 256, 300, 40, 40, F16, bias=f"1hqk{b}") for b in ("-inf", "-far")),
    Case("bias b11k -far f32", 2, 4, 4, 256, 256, 64, 64, F32, bias="b11k-far"),
    Case("bias 1hqk -lowest", 32, 4, 4, 333, 424, 64, 64, BF16, bias="1hqk-lowest"),
    Case("bias b11k bool", 2, 4, 4, 333, 421, 64, 64, BF16, bias="b11k-bool"),
    # so many tiles that Hopper's backward is the fastest
    *(Case(f"many {d}", 4, 16, 16, 1024, 1024, d, dv, BF16) for d, dv in ((32, 24), (64, 64), (128, 128))),
    Case("many 32, window", 4, 16, 16, 1200, 1300, 32, 32, BF16, window=(900, 300)),
    Case("many causal", 4, 16, 8, 1024, 1100, 128, 128, BF16, causal=True),
    Case("many odd f16", 3, 20, 20, 777, 1001, 96, 80, F16, softcap=10.0),
    Case("many odd causal", 4, 16, 16, 1130, 1077, 40, 64, BF16, causal=True, sinks=True, layout="bshd"),
    Case("many, bias", 4, 16, 16, 1024, 1032, 64, 64, BF16, bias="bhqk", causal=True),
    Case("many, bias 128", 3, 16, 8, 1024, 1040, 128, 128, BF16, bias="1hqk"),
    Case("many, bias per key", 4, 16, 8, 1024, 1100, 128, 128, F16, bias="b11k"),
    Case("many, window", 4, 16, 8, 1300, 1500, 128, 128, BF16, window=(1100, None), causal=True),
    Case("many, window both", 4, 16, 16, 1200, 1300, 64, 64, F16, window=(900, 300)),
    Case("many, kv_lens", 8, 16, 4, 1030, 1200, 64, 64, BF16, kv_lens=True, causal=True),
    Case("many, kv_lens 128", 3, 16, 16, 1100, 1050, 128, 96, F16, kv_lens=True, window=(1040, 100)),
    *(Case(f"long {h} {n}", 1, h, 8, 4100, n, 128, 96, F16, causal=n > 4100) for h, n in ((16, 2301), (8, 4224))),
    *(Case(f"long {d} shared", 1, 16, 2, 4100, 4224, d, d, t, causal=True) for d, t in ((64, BF16), (128, F16))),
    Case("right edge, longer", 1, 2, 2, 8200, 8320, 128, 128, BF16, window=(None, 100), sinks=True, layout="bshd"),
    # so many heads that Hopper's backward in order goes upwards under a causal mask; of 4096 crossed
    *(Case(f"many heads {n} causal", 3, 8, 8, n, n, 128, 128, BF16, causal=True) for n in (1024, 4096)),
    Case("more heads 4096 causal", 5, 8, 8, 4096, 4096, 128, 128, BF16, causal=True),  # upwards, two loops
    Case("crossed, shared bias", 1, 13, 13, 2504, 2504, 128, 96, F16, bias="11qk", causal=True),
    Case("crossed, parts of keys", 1, 25, 5, 1280, 1280, 128, 128, F16, causal=True),
    Case("timetable, parts of heads", 1, 5, 5, 6350, 6350, 96, 128, BF16),
    *(Case(f"ranges {d}", 1, h, min(h, 2), n, n - 50, d, dv, t, softcap=d // 128) for d, dv, h, n, t in _RANGES),
    Case("timetable 64", 1, 8, 8, 4000, 4000, 56, 64, F16),
    *(Case(f"crossed {d}", 1, h, h, n, n, d, d, BF16, causal=True) for d, h, n in ((32, 8, 4000), (64, 14, 2300))),
    *(Case(f"sums {h}", 1, h, h, 6200, 6300, 64, 48, F16, causal=True, kv_lens=h > 4) for h in (4, 8)),
    Case("crossed 64, shared bias", 1, 16, 16, 2000, 2000, 48, 64, F16, bias="11qk", causal=True),
    Case("stored bias, window", 2, 8, 2, 700, 904, 128, 104, F16, bias="bhqk", window=(300, 100), kv_lens=True),
    *(Case(f"stored {d} {kv}", 2, 16, kv, n, n + 8, d, d, F16, bias="bhqk", causal=kv < 16) for d, kv, n in _STORED),
    Case("many heads softcap causal 128", 3, 8, 8, 4096, 4096, 128, 128, BF16, causal=True, softcap=5.0),
    Case("many heads 384 softcap causal 64", 6, 4, 4, 333, 384, 64, 64, BF16, causal=True, softcap=5.0),
    Case("many heads 421 softcap causal 64", 6, 4, 4, 333, 421, 64, 64, BF16, causal=True, softcap=5.0),
    Case("many heads odd causal", 6, 4, 4, 777, 1001, 72, 72, F16, causal=True),
    Case("many heads odd softcap causal", 6, 4, 4, 333, 421, 128, 96, F16, causal=True, softcap=5.0),
    Case("longer 72", 1, 2, 2, 8200, 8200, 72, 72, F16, causal=True),
    # several tiles for each program of Hopper's backward beyond head_dim 128
    Case("deep", 2, 8, 8, 1100, 1300, 256, 256, BF16),
    Case("deep causal", 3, 8, 2, 1130, 1077, 256, 256, F16, causal=True, sinks=True, layout="bshd"),
    Case("deep kv_lens", 5, 8, 4, 700, 900, 256, 256, BF16, kv_lens=True),
    Case("deep window both", 4, 8, 8, 900, 1000, 192, 128, BF16, window=(400, 70)),
    Case("deep 136x72", 3, 12, 4, 777, 901, 136, 72, F16, causal=True),
    Case("deep 200x160", 3, 12, 12, 777, 901, 200, 160, BF16),
    Case("deep 96x256", 3, 12, 4, 520, 901, 96, 256, BF16, causal=True),
    Case("deep softcap", 3, 8, 4, 700, 900, 256, 256, BF16, softcap=5.0, window=(300, 9), magnitude=4.0),
    Case("deep, sums that overflow", 3, 8, 8, 500, 1000, 256, 192, BF16, magnitude=100.0, causal=True),
    # packed sequences, of which some are empty; of queries and keys in different ones
    *(
        Case(f"packed {name}", batch, 8, kv_heads, *most, d, dv, (BF16, F16)[i % 2], varlen=True, **options)
        for i, (name, batch, kv_heads, most, d, dv, options) in enumerate(_PACKED)
    ),
    # enough queries for kernels that leave small problems to others; rows of the bias at multiples of 16 bytes, for TMA
    *(
        Case(f"filled {d}x{dv}", 4, 8, 2, 333, 421, d, dv, (BF16, F16)[i % 2], causal=i % 2 == 1)
        for i, (d, dv) in enumerate((*((d, d) for d in (40, 64, 80, 96, 128, 160, 192, 256)), (192, 128), (64, 128)))
    ),
    *(
        Case(f"filled {name}", 4, 4, kv_heads, *lengths, d, d, dtype, **options)
        for name, kv_heads, lengths, d, dtype, options in _FILLED
    ),
    Case("filled everything", *(4, 8, 2, 333, 432, 80, 48, BF16), **_MOST),
    Case("three consumers, causal", 1, 4, 4, 4200, 4200, 64, 64, F16, causal=True),
    # so long that Hopper's forward goes without maxima; and scores that rise by more than exponents hold
    Case("rising scores", 1, 4, 2, 2100, 4100, 64, 64, BF16, magnitude=30.0),
    Case("rising scores 128", 2, 4, 2, 1100, 1300, 128, 128, BF16, magnitude=30.0, sinks=True),
    Case("rising scores causal", 2, 4, 2, 2100, 2200, 128, 128, BF16, magnitude=30.0, causal=True, kv_lens=True),
    Case("packed long 64", 1, 4, 2, 2100, 2100, 64, 64, BF16, varlen=True, magnitude=8.0),
    Case("packed long 128", 1, 4, 2, 2300, 2300, 128, 128, BF16, varlen=True, causal=True),
    Case("long causal", 1, 2, 2, 8200, 8200, 64, 64, BF16, causal=True),
    Case("longer causal", 1, 4, 2, 1024, 16384, 64, 64, BF16, causal=True),
    Case("long causal 40", 1, 4, 2, 1100, 4200, 40, 40, BF16, causal=True),
    # under windows, too: their edges where blocks of keys end, and elsewhere
    Case("long window 64", 2, 8, 4, 1536, 1536, 64, 64, BF16, causal=True, window=(511, None), layout="bshd"),
    Case("long window 64, more keys", 2, 8, 8, 900, 1412, 64, 64, BF16, causal=True, window=(255, 0), sinks=True),
    Case("long window both 64", 2, 8, 4, 1300, 1500, 64, 64, BF16, window=(512, 512)),
    Case("long window 127 and 63", 2, 8, 8, 1100, 1100, 64, 64, BF16, window=(127, 63), kv_lens=True),
    Case("long window 128", 2, 8, 4, 1536, 1536, 128, 128, BF16, causal=True, window=(511, None), layout="bshd"),
    Case("long window both 128", 2, 8, 8, 1300, 1500, 128, 128, BF16, window=(512, 100), sinks=True),
    Case("long window of whole blocks 64", 2, 8, 4, 1536, 1536, 64, 64, BF16, window=(512, 256)),
    Case("long window of whole blocks 128", 2, 8, 8, 1280, 1408, 128, 128, BF16, window=(511, 128), sinks=True),
    Case("long window to the left", 2, 8, 2, 1200, 1100, 48, 64, BF16, window=(200, None), sinks=True),
    Case("long window, rising scores", 2, 8, 8, 1400, 1400, 64, 64, BF16, window=(700, 100), magnitude=30.0),
    # so many heads to one of keys that the Hopper backward splits them
    Case("heads split 128", 2, 16, 1, 1100, 1300, 128, 128, BF16, causal=True, layout="bshd"),
    Case("heads split 64", 3, 10, 2, 700, 600, 64, 48, F16, causal=True, sinks=True, kv_lens=True),
    Case("heads split, packed", 4, 8, 1, 900, 900, 128, 128, BF16, varlen=True, causal=True),
    # where tiles of the Hopper backward walk upwards over blocks of queries that nobody may visit
    Case("upwards, kv_lens", 3, 4, 4, 900, 1000, 128, 128, BF16, causal=True, kv_lens=True),
    Case("upwards, kv_lens, bias", 3, 4, 4, 900, 1000, 128, 128, BF16, causal=True, kv_lens=True, bias="bhqk"),
    Case("upwards, more queries", 2, 4, 4, 900, 500, 96, 128, F16, causal=True, sinks=True),
    # so many tiles that programs of that forward have several
    Case("counted tiles causal", 5, 8, 8, 2048, 2048, 128, 128, BF16, causal=True),
    Case("counted tiles", 5, 8, 2, 2100, 2048, 128, 128, BF16),
    Case("counted tiles 64", 5, 8, 4, 2048, 2176, 64, 64, BF16, causal=True, sinks=True),
    Case("counted tiles, rising", 5, 8, 8, 2100, 1700, 128, 128, BF16, magnitude=30.0, scale=-0.1),
    Case("counted tiles of odd lengths", 5, 8, 4, 3001, 3077, 128, 96, BF16, causal=True, magnitude=30.0),
    *(Case(f"counted packed {n}", 24, 8, 8, n, 1000, 128, 128, BF16, varlen=True, causal=True) for n in (1000, 900)),
    Case("counted packed tiles 64", 24, 8, 2, 1000, 1000, 64, 64, BF16, varlen=True, causal=True, sinks=True),
    Case("counted packed tiles, rising", 9, 8, 4, 1500, 1500, 96, 80, BF16, varlen=True, causal=True, magnitude=30.0),
    # the Hopper backward under a right edge alone at head_dim 128, beside what it may be beside
    Case("right edge 100", 4, 16, 16, 1100, 1300, 128, 128, BF16, window=(None, 100)),
    Case("right edge, softcap", 2, 8, 4, 500, 421, 96, 80, BF16, causal=True, softcap=5.0),
    *(Case(f"softcap causal {d}", 2, 4, 4, 333, 421, d, d, BF16, causal=True, softcap=5.0) for d in (64, 128)),
    *(Case(f"softcap causal {d} long", 1, 2, 2, 4100, 4224, d, d, BF16, causal=True, softcap=5.0) for d in (64, 128)),
    Case("bias bhqk f32 bias long", 1, 2, 2, 1024, 1024, 64, 64, BF16, bias="bhqk", bias_dtype=F32),
    Case("bias bhqk f32 bias 128", 1, 4, 2, 512, 513, 128, 128, BF16, bias="bhqk", bias_dtype=F32),
    Case("bias bhqk f32 bias 128 causal", 1, 4, 4, 512, 768, 128, 128, BF16, bias="bhqk", bias_dtype=F32, causal=True),
    Case("bias bhqk 128 ragged", 1, 4, 4, 384, 397, 128, 104, BF16, bias="bhqk"),
    Case("bias 1hqk f32 bias causal long", 2, 2, 2, 4100, 4200, 64, 64, BF16, bias="1hqk", bias_dtype=F32, causal=True),
    Case("right edge, bias per key", 2, 8, 4, 333, 421, 128, 128, BF16, causal=True, bias="b11k"),
    Case("right edge, more queries", 2, 8, 8, 700, 421, 128, 128, F16, causal=True, sinks=True),
    # columns in two halves, without maxima; and scores for which that will not do
    Case("halves 192 causal", 20, 8, 4, 1024, 1152, 192, 192, BF16, causal=True, sinks=True),
    Case("halves 256 causal", 20, 4, 4, 1100, 1228, 256, 200, BF16, causal=True),
    Case("halves 96 causal", 20, 8, 8, 1024, 1024, 96, 80, BF16, causal=True, layout="bshd"),
    Case("halves 192, rising scores", 3, 8, 2, 900, 1100, 192, 128, BF16, magnitude=30.0),
    Case("halves 256, rising scores", 3, 4, 2, 1024, 1024, 256, 256, BF16, causal=True, magnitude=30.0),
    Case("halves 192, whole blocks", 3, 8, 2, 1100, 1152, 192, 192, BF16, layout="bshd"),
    Case("halves 256x192", 2, 8, 8, 1100, 1300, 256, 192, BF16, sinks=True),
    Case("halves 256x128, few queries in the last tile", 3, 4, 4, 1050, 1050, 256, 128, BF16, causal=True),
    Case("halves 96x64 causal", 3, 8, 8, 1030, 1030, 96, 64, BF16, causal=True),
    Case("counted halves, rising", 9, 8, 8, 1500, 1500, 256, 256, BF16, causal=True, sinks=True, magnitude=30.0),
    Case("halves 72, rising scores", 3, 8, 8, 1100, 1300, 72, 64, BF16, magnitude=30.0),
    Case("many 256", 50, 4, 2, 300, 200, 256, 256, BF16, causal=True),
    Case("many 192 and 128", 40, 4, 4, 257, 300, 192, 128, BF16),
    *(
        Case(f"one tile {lq}x{lk} {d}", 133, 8, kv, lq, lk, d, d, dtype, **options)
        for lq, lk, d, kv, dtype, options in (
            *((128, 128, 64, 8, BF16, {}), (128, 100, 128, 2, F16, {"layout": "bshd"})),
            *((100, 128, 72, 8, BF16, {"causal": True}), (64, 64, 128, 8, BF16, {})),
            (128, 64, 96, 4, BF16, {"causal": True, "layout": "bshd"}),
            (100, 90, 96, 8, F16, {"window": (30, 20)}),
        )
    ),
    Case("many short", 33, 8, 8, 130, 70, 64, 64, BF16),
    Case("many short causal", 33, 8, 2, 257, 257, 128, 128, BF16, causal=True),
    Case("rows of triangle attention", 32, 4, 4, 500, 504, 32, 32, BF16, bias="1hqk"),
    Case("rows of triangle attention 256", 36, 4, 4, 300, 256, 32, 32, BF16, bias="1hqk-far"),
    Case("rows of triangle attention 768 24x24 f16", 8, 8, 8, 700, 760, 24, 24, F16, bias="1hqk", layout="bshd"),
    Case("rows of triangle attention 24x32 f16", 20, 4, 4, 530, 520, 24, 32, F16, bias="2hqk"),
    Case("rows of triangle attention -inf", 17, 3, 3, 533, 600, 32, 32, BF16, bias="11qk-inf"),
    Case("rows of triangle attention -far", 19, 4, 4, 512, 640, 32, 32, BF16, bias="1hqk-far", layout="bshd"),
    Case("rows of triangle attention -lowest", 19, 4, 4, 512, 640, 32, 32, BF16, bias="1hqk-lowest"),
    Case("rows of triangle attention, 72 rows", 72, 4, 4, 260, 648, 32, 32, BF16, bias="1hqk"),
    Case("rows of triangle attention, 66 rows f16", 66, 2, 2, 300, 904, 24, 32, F16, bias="1hqk", layout="bshd"),
    Case("rows of triangle attention 1100", 64, 1, 1, 1100, 1032, 32, 32, BF16, bias="1hqk"),
    Case("rows of triangle attention 392 -lowest", 35, 4, 4, 264, 392, 32, 32, BF16, bias="1hqk-lowest"),
    Case("rows of triangle attention 360 -inf", 35, 4, 4, 264, 360, 24, 32, F16, bias="11qk-inf", layout="bshd"),
    Case("rows of triangle attention 360, 16 heads", 8, 16, 16, 332, 360, 32, 32, BF16, bias="1hqk"),
    Case("rows of triangle attention 360, 330 queries", 8, 16, 16, 330, 360, 32, 32, BF16, bias="1hqk"),
    Case("rows of triangle attention 256, 16 heads", 8, 16, 16, 256, 256, 32, 32, BF16, bias="1hqk"),
    Case("rows of triangle attention 384 -far", 64, 4, 4, 384, 384, 32, 32, BF16, bias="11qk-far"),
    Case("rows of triangle attention f32", 16, 4, 4, 384, 384, 32, 32, F32, bias="1hqk"),
    Case("rows of triangle attention f32 odd", 32, 4, 4, 500, 520, 32, 32, F32, bias="1hqk"),
    Case("rows of triangle attention f32 24x32", 20, 4, 4, 530, 520, 24, 32, F32, bias="2hqk", magnitude=8.0),
    Case("rows of triangle attention f32 -inf", 17, 3, 3, 533, 600, 32, 32, F32, bias="11qk-inf"),
    Case("rows of triangle attention f32 -lowest", 19, 4, 4, 512, 640, 32, 32, F32, bias="1hqk-lowest", layout="bshd"),
    Case("rows of triangle attention 4000", 6, 2, 2, 4000, 4000, 32, 32, BF16, bias="1hqk"),
    Case("rows of triangle attention 2904 24x24 f16", 7, 2, 2, 2832, 2904, 24, 24, F16, bias="1hqk", layout="bshd"),
    Case("rows of triangle attention f32 2848", 9, 1, 1, 2832, 2848, 32, 32, F32, bias="1hqk"),
    Case("rows of triangle attention 2821", 5, 2, 2, 2821, 2821, 32, 32, BF16, bias="1hqk"),
    Case("rows of triangle attention f32 2821", 3, 2, 2, 2821, 2821, 24, 32, F32, bias="1hqk"),
    Case("bias 1hqk tf32", 2, 4, 4, 256, 300, 64, 64, F32, "tf32", bias="1hqk"),
    Case("kv_lens", 5, 4, 2, 333, 421, 64, 64, BF16, kv_lens=True),
    Case("kv_lens causal f32", 5, 4, 4, 256, 256, 64, 64, F32, kv_lens=True, causal=True),
    Case("varlen", 7, 4, 2, 421, 421, 64, 64, BF16, varlen=True, causal=True),
    Case("varlen f32", 6, 4, 4, 200, 333, 64, 64, F32, varlen=True),
    Case("varlen everything", 6, 4, 1, 333, 200, 128, 64, F16, varlen=True, window=(99, 40), softcap=3.0, sinks=True),
    Case("everything", *(3, 8, 2, 333, 421, 80, 48, BF16), **_MOST, softcap=5.0),
    Case("neighbours", 2000, 8, 8, 40, 40, 16, 16, F32, bias="b11k"),
    *(
        Case(f"neighbours {kind_of(*kind)} {k} {d}x{dv} {bias}", n, 8, 8, k, k, d, dv, *kind, bias=bias)
        for kind, n, k, d, dv, bias in (
            (KINDS[2], 2000, 64, 16, 16, "b11k"),
            (KINDS[3], 600, 64, 16, 16, "bh1k"),
            (KINDS[4], 60, 64, 16, 24, "b11k"),
            (KINDS[0], 600, 64, 16, 16, "b11k"),
            (KINDS[1], 600, 61, 16, 32, "bhqk"),
            (KINDS[2], 600, 32, 64, 64, "b11k"),
            (KINDS[3], 300, 32, 64, 40, "bhqk-inf"),
            (KINDS[4], 60, 32, 32, 64, ""),
            (KINDS[0], 600, 30, 64, 64, "b11k-inf"),
            (KINDS[2], 600, 16, 16, 8, "b11k-far"),
            (KINDS[0], 700, 16, 32, 32, ""),
            (KINDS[2], 1101, 16, 8, 8, "b11k"),
            (KINDS[3], 1100, 8, 16, 16, "bh1k"),
            (KINDS[0], 1101, 16, 16, 16, "bhqk-inf"),
            (KINDS[1], 1100, 9, 16, 8, ""),
            (KINDS[4], 1100, 12, 8, 8, "b11k"),
            (KINDS[2], 60, 50, 40, 24, "b1qk-bool"),
            (KINDS[2], 60, 64, 64, 64, "bhqk"),
            (KINDS[0], 60, 64, 64, 64, "bh1k"),
        )
    ),
    *(
        Case(f"neighbours, ragged {kind_of(*kind)}", 600, 8, 8, 64, 64, 16, 16, *kind, bias="b11k", kv_lens=True)
        for kind in (KINDS[0], KINDS[2])
    ),
    *(
        Case(f"neighbours {kind_of(*kind)} {keys} {d}x{dv} {bias}", 9, 4, 4, keys, keys, d, dv, *kind, bias=bias)
        for kind, keys, d, dv, bias in (
            (KINDS[2], 88, 16, 16, "b11k"),
            (KINDS[3], 128, 16, 16, "bh1k"),
            (KINDS[0], 88, 16, 16, "b11k"),
            (KINDS[1], 101, 32, 16, "bhqk"),
            (KINDS[2], 128, 32, 32, "bhqk-inf"),
            (KINDS[4], 70, 24, 16, "b11k"),
            (KINDS[0], 128, 16, 32, "b1qk-bool"),
        )
    ),
    Case("neighbours, ragged tf32x3 128", 9, 4, 2, 128, 128, 16, 16, F32, bias="b11k", kv_lens=True, causal=True),
    Case("no keys", 2, 4, 2, 33, 0, 16, 16, F32),
    Case("no queries", 2, 4, 2, 0, 33, 16, 16, F32, bias="b11k"),
    Case("neighbours, few queries", 600, 8, 8, 1, 48, 32, 32, F32, bias="b11k"),
    Case("neighbours, rows apart", 60, 8, 2, 33, 64, 8, 24, F32, bias="b11k", layout="apart"),
    Case("neighbours, gqa", 600, 8, 2, 33, 64, 16, 16, F32, bias="b11k", sinks=True, layout="bshd"),
    Case("neighbours, two in a program", 1501, 6, 3, 12, 15, 16, 8, F16, bias="b11k", sinks=True, kv_lens=True),
    Case("neighbours, odd", 8449, 1, 1, 16, 16, 8, 8, F32, bias="b11k", softcap=4.0),
    Case("neighbours, causal", 600, 4, 4, 50, 64, 24, 16, BF16, causal=True, window=(30, None), softcap=4.0),
    Case("neighbours, everything", 600, 4, 2, 100, 60, 24, 32, F32, bias="b11k-inf", window=(50, None), **_ALL),
    # large enough for keys and values in parts
    Case("in parts", 1, 4, 2, 1000, 1100, 64, 64, F32, sinks=True),
    Case("in parts tf32", 1, 8, 8, 1040, 1030, 32, 32, F32, "tf32", causal=True, window=(300, None), softcap=5.0),
    Case("in parts 64x40", 2, 4, 4, 800, 900, 64, 40, F32, bias="b11k", layout="bshd"),
    Case("in parts 48 tf32", 2, 4, 4, 800, 900, 48, 48, F32, "tf32", bias="bhqk"),
    # and these in halves: of the batch, of the heads, with slices of a bias
    Case("in halves", 4, 8, 8, 2048, 2048, 64, 64, F32),
    Case("in halves, gqa", 1, 32, 16, 2048, 2048, 64, 64, F32, causal=True),
    Case("in halves, bias", 4, 8, 8, 2048, 2048, 64, 32, F32, bias="2hqk"),
    # few queries over many keys
    *(
        Case(f"few {name}", batch, heads, kv_heads, *lengths, d, d, dtype, **options)
        for name, (batch, heads, kv_heads), lengths, d, dtype, options in _FEW
    ),
    Case("few 192 and 128", 3, 16, 2, 4, 2000, 192, 128, BF16, causal=True),
    Case("few 40 and 24", 3, 16, 2, 4, 2000, 40, 24, F16, kv_lens=True),
    Case("over 2**31 elements of keys", 33, 8, 8, 1, 65600, 128, 128, BF16),
    Case("over 65535 heads", 4200, 16, 16, 17, 20, 16, 16, BF16),
    Case("over 65535 heads, two blocks", 4200, 16, 8, 66, 20, 40, 40, BF16, causal=True),
    Case("over 65535 heads f32", 8200, 8, 4, 9, 12, 32, 32, F32, causal=True, bias="1hqk"),
    Case("over 2**31 elements", 66, 256, 1, 512, 16, 256, 256, BF16),
    *(Case(f"over 2**31 elements of bias {d}", 129, 64, 64, 512, 520, d, d, BF16, bias="bhqk") for d in (16, 40)),
)

_QUICK = (
    *("bf16 32x32", "bf16 64x64", "bf16 128x128", "tf32x3 64x64", "tf32x3 192x128", "f16 128", "tf32 64", "ieee 32"),
    *("square 1024 causal", "one query", "rows with nothing", "window both f32"),
    *("softcap", "sinks", "large scores f16"),
    *("bias bhqk", "bias 1hqk f32", "bias b11k", "bias bhq1 f32", "bias 1hqk -inf f16", "kv_lens", "varlen"),
    *("varlen everything", "everything", "over 65535 heads"),
    *("filled 64x64", "filled 128x128", "filled bias bhqk 64", "filled everything"),
)
QUICK: tuple[Case, ...] = tuple(case for case in GPU if case.name in _QUICK)

_TOKENS = 32768  # batch x length of the bench cases

_TRAINED = (KINDS[0], KINDS[2], KINDS[3])  # what one trains in
BENCH: dict[str, tuple[Case, ...]] = {
    "plain": tuple(
        _square(f"D{d} {'causal ' if causal else ''}S{s}", _TOKENS // s, 2048 // d, s, d, BF16, causal=causal)
        for d in (64, 128)
        for causal in (False, True)
        for s in (1024, 2048, 4096, 8192, 16384)
    ),
    "bias": tuple(
        _square(f"({b},{h},{s},{d})", b, h, s, d, BF16, bias="1hqk")
        for b, h, s, d in ((64, 4, 384, 32), (8, 16, 768, 32), (2, 16, 2048, 64), (1, 16, 4096, 128))
    ),
    "triangle": (  # a row is a batch element; and samples of one complex
        *(_square(f"N{n}", n, 4, n, 32, BF16, bias="1hqk") for n in (256, 512, 1024)),
        *(_square(f"N{n} tf32x3", n, 4, n, 32, F32, "tf32x3", bias="1hqk") for n in (256, 512, 1024)),
        *(_square(f"16 samples D{d}", 16, 16, 1024, d, BF16, bias="1hqk") for d in (24, 48)),
    ),
    "second": tuple(
        _square(f"({b},{h},{s},{d}) {kind_of(*kind)}", b, h, s, d, *kind)
        for b, h, s, d in ((1, 16, 4096, 64), (1, 16, 8192, 64), (8, 8, 512, 64))
        for kind in _TRAINED
    )
    + (_square("(1,16,65536,64) bf16", 1, 16, 65536, 64, BF16),),
    "neighbours": (  # each atom's neighbours attend to each other, under a bias for each of them
        *(_square(f"10000 x 64 D16 {kind_of(*kind)}", 10_000, 8, 64, 16, *kind, bias="b11k") for kind in _TRAINED),
        *(_square(f"200000 x 64 D16 {kind_of(*k)}", 200_000, 8, 64, 16, *k, bias="b11k") for k in _TRAINED[:2]),
        _square("10000 x 32 D64 tf32x3", 10_000, 8, 32, 64, F32, "tf32x3", bias="b11k"),
    ),
    "jvp": tuple(_square(f"(4,8,2048,64) {kind_of(*kind)}", 4, 8, 2048, 64, *kind) for kind in _TRAINED),
    "gqa": tuple(
        _square(f"32/{kv} heads {'causal ' if causal else ''}S4096", 8, 32, 4096, 128, BF16, kv_heads=kv, causal=causal)
        for kv in (8, 4, 1)
        for causal in (False, True)
    ),
    "varlen": tuple(
        _square(f"{n} sequences to {s} D{d}", n, 2048 // d, s, d, BF16, varlen=True, causal=True)
        for n, s, d in ((64, 1024, 64), (16, 4096, 128), (64, 1024, 128), (10, 8000, 64), (10, 8000, 128))
    )
    + (Case("16 sequences to 4096 D192/128", 16, 16, 16, 4096, 4096, 192, 128, BF16, varlen=True, causal=True),),
    "long": (_square("D128 causal S131072", 1, 16, 131072, 128, BF16, causal=True),),
    "window": tuple(  # of 1024 keys; (batch, length, heads, dim) in memory, which can be looked at as packed
        _square(f"{name} D{d} S{s}", _TOKENS // s, 2048 // d, s, d, BF16, causal=causal, window=window, layout="bshd")
        for name, causal, window in (("causal", True, (1023, 0)), ("both sides", False, (512, 512)))
        for d in (64, 128)
        for s in (4096, 16384)
    ),
    "short": tuple(
        _square(f"{'causal ' * causal}S{s} D{d}", _TOKENS // s, 1024 // d, s, d, BF16, causal=causal)
        for causal, lengths in ((False, (64, 128, 256, 512)), (True, (512,)))
        for d in (64, 128)
        for s in lengths
    ),
    "decode": tuple(  # queries of (batch, heads, kv_heads) over so many keys
        Case(f"({b},{h},{kv}) {q} over {k}", b, h, kv, q, k, 128, 128, BF16, causal=q > 1, layout="bshd")
        for b, h, kv, q, k in (
            *((1, 32, 8, 1, 32768), (16, 32, 32, 1, 4096), (16, 32, 8, 1, 8192), (64, 32, 4, 1, 4096)),
            *((64, 32, 8, 1, 512), (16, 32, 8, 4, 8192), (16, 32, 8, 16, 8192), (16, 32, 1, 1, 32768)),
        )
    )
    + (Case("packed (64,32,8) 1 over up to 8192", 64, 32, 8, 1, 8192, 128, 128, BF16, varlen=True),),
    "head_dims": tuple(
        _square(f"D{d}", 8, max(1, 2048 // d), 4096, d, BF16, causal=True)
        for d in (16, 32, 40, 64, 80, 96, 128, 192, 256)
    ),
}

BENCH_CPU: dict[str, tuple[Case, ...]] = {
    "plain": tuple(
        _square(f"{'causal ' if causal else ''}S{s}", 1, 4, s, 64, F32, causal=causal)
        for causal in (False, True)
        for s in (512, 1024, 2048, 4096)
    ),
    "bias": tuple(_square(f"S{s}", 1, 4, s, 64, F32, bias="1hqk") for s in (512, 1024, 4096)),
    "second": tuple(_square(f"S{s}", 1, 4, s, 64, F32) for s in (512, 1024, 4096)),
    "neighbours": (_square("50 x 32 D16", 50, 8, 32, 16, F32, bias="b11k"),),
    "jvp": (_square("S1024", 1, 4, 1024, 64, F32),),
    "gqa": (_square("8/2 heads S1024", 1, 8, 1024, 64, F32, kv_heads=2, causal=True),),
    "varlen": (_square("8 sequences to 512", 8, 4, 512, 64, F32, varlen=True, causal=True),),
    "window": (_square("causal S2048", 1, 4, 2048, 64, F32, causal=True, window=(255, 0), layout="bshd"),),
    "short": tuple(_square(f"S{s}", 1024 // s, 4, s, 64, F32) for s in (64, 128, 256)),
    "head_dims": tuple(_square(f"D{d}", 1, 4, 1024, d, F32) for d in (16, 40, 128, 256)),
}
