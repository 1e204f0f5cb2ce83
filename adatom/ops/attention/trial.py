"""A case of attention with its tensors: the truth in float64, what PyTorch makes of it, what a launcher is given.

And which cases stand for what: the user's own, a small version of a large one, those that reach every kernel.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from adatom.ops.attention import api, cases, reference
from adatom.ops.attention.cases import BF16, F16, F32, KINDS, Case, kind_of
from adatom.ops.attention.problem import Inputs, Options, Problem, empty_like, empty_lse, empty_out, problem
from adatom.verify import FLOOR_TF32, FLOORS, named, rms, round_tf32

Tensor = torch.Tensor
Tensors = dict[str, Tensor]

OUTPUTS = {
    "attention_fwd": ("out", "lse"),
    "attention_bwd": ("dq", "dk", "dv", "dbias", "dsinks"),
    "attention_bwd_bwd": ("dq2", "dk2", "dv2", "dbias2", "dsinks2", "ddout", "ddlse"),
    "attention_jvp": ("tout", "tlse"),
}
PASSES = {
    "attention_fwd": reference.forward,
    "attention_bwd": reference.backward,
    "attention_bwd_bwd": reference.backward_backward,
    "attention_jvp": reference.jvp,
}
COTANGENTS = ("ddq", "ddk", "ddv", "ddbias", "ddsinks")  # of the gradients; `attention_jvp` takes them as tangents


class _MatmulTF32(torch.autograd.Function):
    """A matrix product of operands rounded to TF32, in every derivative too."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return torch.matmul(round_tf32(a), round_tf32(b))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return _MatmulTF32.apply(grad, b.mT), _MatmulTF32.apply(a.mT, grad)


class _EmulateTF32(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.matmul, Tensor.matmul, Tensor.__matmul__) and args[0].dtype == torch.float32:
            with torch._C.DisableTorchFunction():
                return _MatmulTF32.apply(*args)
        return func(*args, **(kwargs or {}))


@contextmanager
def _arithmetic(x: Inputs, o: Options) -> Iterator[None]:
    """PyTorch's float32 matrix products in the precision that the kernel is asked for. TF32 is emulated: PyTorch's own
    depends on alignment, and products of odd lengths would be a yardstick of float32."""
    tf32 = o.precision == "tf32" and x.q.dtype == torch.float32
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with _EmulateTF32() if tf32 else nullcontext():
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class Trial:
    """A case with its tensors, the truth and what PyTorch makes of it; passes are computed when first asked for.

    One case in two gets all cotangents, the others lack some, as autograd may leave them out.
    """

    def __init__(self, case: Case, device: torch.device, seed: int = 0) -> None:
        self.case = case
        self.x, self.o, _ = api.inputs_of(**cases.make(case, device, seed))
        q, k, v, bias, sinks = self.x[:5]
        self.bias_grad = bias is not None and bias.is_floating_point() and case.bias_grad
        random = torch.Generator(device).manual_seed(seed + 1)

        def draw(like: Tensor, dtype: torch.dtype) -> Tensor:
            inner = like.dim() == 4 and case.layout == "bshd" and like is not bias  # heads inside length, as in q
            shape = like.transpose(1, 2).shape if inner else like.shape
            wide = torch.bfloat16 if case.huge else torch.float32
            drawn = torch.randn(shape, generator=random, device=device, dtype=wide).to(dtype)
            return drawn.transpose(1, 2) if inner else drawn

        lacking = ((), (), (), (), ("dlse",), ("ddv", "dlse"), ("ddq", "ddbias"), ("ddk", "ddsinks"))
        lacks = lacking[zlib.crc32(case.name.encode()) % len(lacking)]
        wants = (q, k, v, bias if self.bias_grad else None, sinks)
        self.dout = draw(q[..., :1].expand(*q.shape[:-1], v.shape[-1]), q.dtype)
        lse = q[..., 0] if q.dim() == 4 else q[..., 0].T
        self.dlse = None if "dlse" in lacks else draw(lse, torch.promote_types(q.dtype, torch.float32))
        self.dd = [
            None if like is None or name in lacks else draw(like, like.dtype) for name, like in zip(COTANGENTS, wants)
        ]
        self.forwards: dict[str, tuple[Tensor, Tensor]] = {}  # out and lse by backend, for its derivatives
        self._truth: dict[str, Tensors] = {}
        self._formulas: dict[str, Tensors] = {}

    def part(self, i: int) -> Trial:
        """Batch element i alone, for cases too large to be judged whole: padded, no sinks, a bias for each."""
        one = copy.copy(self)
        one.__dict__.pop("_autograd", None)

        def cut(t: Any) -> Any:
            return None if t is None else t[i : i + 1]

        one.x = Inputs(*map(cut, self.x))
        one.dout, one.dlse, one.dd = cut(self.dout), cut(self.dlse), [cut(t) for t in self.dd]
        one._truth, one._formulas = {}, {}
        return one

    @property
    def problem(self) -> Problem:
        """What the choice of a kernel may look at."""
        return problem(self.x, self.o, self.bias_grad)

    @cached_property
    def floor(self) -> float:
        """Relative error that is always allowed: one rounding of the results, and one of scores as large as these."""
        dtype = self.x.q.dtype
        lse = self.truth("attention_fwd")["lse"]
        seen = lse[lse.isfinite()]
        scores = float(seen.square().mean().sqrt()) if seen.numel() else 0.0
        rounding = FLOOR_TF32 if dtype == torch.float32 and self.o.precision == "tf32" else FLOORS[dtype]
        return rounding + scores * 2.0 ** (-53 if dtype == torch.float64 else -24)

    def least(self, name: str, want: Tensor, biggest: float) -> float:
        """Relative error that is always allowed in an output: the floor, the rounding of terms as large as the largest
        of the pass, and that of a float32 sum over as many scores as the gradient of a bias or sink has."""
        size = max(rms(want), 1e-30)
        terms = (2.0**-53 if self.x.q.dtype == torch.float64 else 2.0**-24) * min(biggest / size, 16.0)
        if name.startswith(("dbias", "dsinks")) and want.numel():
            scores = self.x.q[..., 0].numel() * self.x.k.shape[0 if self.x.q.dim() == 3 else 2] / want.numel()
            terms += 2.0**-24 * math.sqrt(scores) * biggest / size
        return self.floor + terms

    def parts(self, results: Tensors) -> list[tuple[Trial, Tensors]]:
        """The results with the trial to judge them by; of a huge case the first and last batch element: addresses
        overflow at the last one, if at all."""
        if not self.case.huge:
            return [(self, results)]
        ends = (0, self.case.batch - 1)
        return [(self.part(i), {name: t[i : i + 1] for name, t in results.items()}) for i in ends]

    def arguments(self, op: str, out: Tensor | None = None, lse: Tensor | None = None) -> tuple[Any, ...]:
        """What a launcher of a pass gets, given the out and lse of a forward; None stands for the truth, rounded."""
        if op == "attention_fwd":
            return self.x, self.o
        if out is None or lse is None:
            true = self.truth("attention_fwd")
            out = true["out"].to(self.x.q.dtype)
            lse = true["lse"].to(torch.promote_types(self.x.q.dtype, torch.float32))
        if op == "attention_bwd":
            return self.x, self.o, out, lse, self.dout, self.dlse, self.bias_grad
        if op == "attention_bwd_bwd":
            return self.x, self.o, out, lse, self.dout, self.dlse, *self.dd, self.bias_grad
        return self.x, self.o, out, lse, *self.dd

    def truth(self, op: str) -> Tensors:
        """The results of a pass by the reference in float64."""
        if op not in self._truth:
            forward = () if op == "attention_fwd" else self.truth("attention_fwd").values()
            self._truth[op] = named(op, PASSES[op](*_float64(self.arguments(op, *forward))))
        return self._truth[op]

    def yardsticks(self, op: str) -> tuple[Tensors, Tensors]:
        """What PyTorch makes of a pass in the precision of the case: by autograd, and by the reference's formulas."""
        return self._autograd[op], self.formulas(op)

    def formulas(self, op: str) -> Tensors:
        """The results of a pass by the reference in the precision of the case."""
        if op not in self._formulas:
            forward = () if op == "attention_fwd" else self.formulas("attention_fwd").values()
            with _arithmetic(self.x, self.o):
                self._formulas[op] = named(op, PASSES[op](*self.arguments(op, *forward)))
        return self._formulas[op]

    @cached_property
    def _autograd(self) -> dict[str, Tensors]:
        """Every pass of dense attention by autograd, in the precision of the case."""
        has = [True, True, True, self.bias_grad, self.x.sinks is not None]
        leaves = [t.detach().requires_grad_() if h and t is not None else t for t, h in zip(self.x, has)]
        wanted = [t for t, h in zip(leaves, has) if t is not None and h]

        def spread(values: Sequence[Tensor]) -> list[Tensor | None]:
            left = iter(values)
            return [next(left).detach() if h else None for h in has]

        with _arithmetic(self.x, self.o):
            out, lse = reference.attention(Inputs(*leaves, *self.x[5:]), self.o)  # type: ignore[call-arg, arg-type]
            dlse = torch.zeros_like(lse) if self.dlse is None else self.dlse
            seeds = [self.dout.detach().requires_grad_(), dlse.detach().requires_grad_()]
            grads = torch.autograd.grad((out, lse), wanted, seeds, create_graph=True)
            along = [(g, t) for g, t in zip(grads, (t for t, h in zip(self.dd, has) if h)) if t is not None]
            seconds = torch.autograd.grad(
                [g for g, _ in along], [*wanted, *seeds], [t for _, t in along], materialize_grads=True
            )
        n = len(wanted)
        return {
            "attention_fwd": named("attention_fwd", (out.detach(), lse.detach())),
            "attention_bwd": named("attention_bwd", spread(grads)),
            "attention_bwd_bwd": named("attention_bwd_bwd", (*spread(seconds[:n]), *seconds[n:])),
            "attention_jvp": named("attention_jvp", seconds[n:]),  # what moves with dout and dlse is the jvp
        }


def _float64(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, Inputs):
            yield Inputs(*_float64(value))
        else:
            yield value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


# -- which cases stand for what ----------------------------------------------------------------------------------------


OWN = ("precision", "bias", "causal", "window", "softcap", "scale", "sinks", "kv_lens", "varlen")  # options of `own`


def own(shape: list[int] | None, dtype: torch.dtype, **options: Any) -> Case:
    """The user's own case: shape (batch, heads, seqlen, head_dim) or (batch, heads, kv_heads, seqlen_q, seqlen_k,
    head_dim, head_dim_v), and options as fields of a Case; window as "LEFT,RIGHT". ValueError for what is no case."""
    numbers = shape or [2, 2, 40, 32]
    if len(numbers) not in (4, 7):
        raise ValueError(f"a shape of attention is 4 or 7 integers, not {len(numbers)}")
    if len(numbers) == 4:
        batch, heads, seqlen, dim = numbers
        numbers = [batch, heads, heads, seqlen, seqlen, dim, dim]
    bias = options.get("bias", "")
    fits = all(given in ("1", letter) for given, letter in zip(bias, "bhqk"))
    if bias and not (fits and len(bias) >= 4 and bias[4:] in ("", "-inf", "-bool", "-far", "-lowest")):
        hint = "four letters, bhqk or 1 to broadcast, then nothing, -inf, -bool, -far or -lowest: 1hqk, b11k-bool"
        raise ValueError(f"a bias is {hint}; not {bias!r}")
    if options.get("varlen") and (bias or "kv_lens" in options):
        raise ValueError("packed sequences take no bias, and have no padding for --kv-lens")
    if "window" in options:
        left, _, right = options["window"].partition(",")
        if not all(side.strip().lstrip("-").isdigit() for side in (left, right)):
            raise ValueError(f"a window is 2 integers, LEFT,RIGHT; not {options['window']!r}")
        options["window"] = int(left), int(right)
    case = Case("yours", *numbers, dtype, **options)  # type: ignore[arg-type, call-arg]
    api.inputs_of(**cases.make(case, "cpu"))
    return case


def shrunk(case: Case, on_gpu: bool) -> tuple[Case, ...]:
    """Small cases with the options, dims and ratio of heads of a large one, the likeliest first: a GPU's tiles want
    longer lengths than a CPU's, and some kernels leave small problems and odd rows of a bias to others."""
    seqlen, group = 300 if on_gpu else 40, case.heads // case.kv_heads
    kv_heads = min(case.kv_heads, 2)
    batch = min(case.batch, 4 if case.varlen else 2)
    small = case._replace(name="small", batch=batch, heads=group * kv_heads, kv_heads=kv_heads)
    small = small._replace(seqlen_q=min(case.seqlen_q, seqlen), seqlen_k=min(case.seqlen_k, seqlen + 37))
    return (small,) if case.varlen else (small, small._replace(batch=32, seqlen_k=min(case.seqlen_k, 336)))


# cases that together reach every kernel configuration
_VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bias bhqk", {"bias": "bhqk"}),
    ("bias 1hqk causal", {"bias": "1hqk", "causal": True}),
    ("bias b11k", {"bias": "b11k"}),
    ("bias bhq1", {"bias": "bhq1"}),
    ("bias bool", {"bias": "b1qk-bool"}),
    ("window", {"window": (64, 32)}),
    ("window causal sinks", {"window": (64, None), "causal": True, "sinks": True}),
    ("softcap", {"softcap": 20.0}),
    ("kv_lens causal", {"kv_lens": True, "causal": True}),
    ("varlen", {"varlen": True}),
    ("varlen causal", {"varlen": True, "causal": True}),
)

_LOOPS: tuple[tuple[str, int, dict[str, Any]], ...] = (  # in which Hopper's backward visits blocks of queries
    ("varlen upwards", 512, {"varlen": True, "causal": True}),
    ("softcap causal long", 4100, {"softcap": 20.0, "causal": True}),
    ("kv_lens window", 512, {"kv_lens": True, "window": (64, 32)}),
    ("varlen window softcap", 512, {"varlen": True, "window": (64, 32), "softcap": 20.0}),
)

COMPILE: tuple[Case, ...] = (
    *(
        Case(f"{kind_of(*kind)} {d} {'causal' if causal else 'full'}", 1, 4, 4, 512, 512, d, d, *kind, causal=causal)
        for kind in KINDS
        for d in (16, 32, 64, 128, 256)
        for causal in (False, True)
    ),
    *(
        Case(f"{kind_of(*kind)} {d} {name}", 2, 4, 2, 512, 512, d, d, *kind, **options)
        for kind, d in ((KINDS[0], 64), (KINDS[0], 128), (KINDS[2], 64))
        for name, options in _VARIANTS
    ),
    *(
        Case(f"{kind_of(*kind)} {d}x{dv} full", 1, 4, 4, 512, 512, d, dv, *kind)
        for kind in (KINDS[0], KINDS[2])
        for d, dv in ((40, 40), (192, 128), (40, 24), (192, 16))
    ),
    *(Case(f"bf16 {d} varlen, other keys", 2, 4, 2, 500, 512, d, d, BF16, varlen=True, causal=True) for d in (64, 128)),
    *(
        Case(f"bf16 {d} {name}", 2, 4, 4, n, n, d, d, BF16, **options)
        for d in (32, 64, 128)
        for name, n, options in _LOOPS
    ),
    *(Case(f"bf16 {d}x{d} varlen causal", 2, 4, 2, 512, 512, d, d, BF16, varlen=True, causal=True) for d in (192, 256)),
    Case("bf16 192x128 varlen", 2, 4, 2, 512, 512, 192, 128, BF16, varlen=True),
    Case("f16 256x192 varlen window", 2, 4, 2, 500, 512, 256, 192, F16, varlen=True, window=(64, 32), sinks=True),
    Case("bf16 192 causal", 2, 4, 2, 512, 512, 192, 192, BF16, causal=True),
    Case("bf16 256 softcap causal", 2, 4, 2, 512, 512, 256, 256, BF16, softcap=50.0, causal=True),
    Case("bf16 128 softcap causal", 2, 4, 2, 512, 512, 128, 128, BF16, softcap=20.0, causal=True),
    Case("bf16 128 causal longer", 2, 4, 4, 1024, 1024, 128, 128, BF16, causal=True),
    *(Case(f"bf16 {d} many heads causal", 1, 24, 24, 512, 512, d, d, BF16, causal=True) for d in (64, 128)),
    *(Case(f"bf16 {d} many softcap", 1, 24, 24, 512, 512, d, d, BF16, causal=True, softcap=9.0) for d in (64, 128)),
    Case("bf16 128 bias b11k causal", 2, 4, 2, 512, 512, 128, 128, BF16, bias="b11k", causal=True),
    Case("bf16 64 apart causal", 2, 4, 2, 512, 512, 64, 64, BF16, layout="apart", causal=True),
    Case("f16 256x128 window kv_lens", 2, 4, 2, 512, 512, 256, 128, F16, window=(64, 32), kv_lens=True),
    Case("bf16 192x256 kv_lens causal", 2, 4, 2, 512, 512, 192, 256, BF16, kv_lens=True, causal=True),
    Case("bf16 256x192 window", 2, 4, 2, 512, 512, 256, 192, BF16, window=(64, 32)),
)

_MOST_SHARED_MEMORY: dict[str, Any] = {
    "bias": "bhqk",
    "bias_dtype": torch.float32,
    "kv_lens": True,
    "causal": True,
    "softcap": 5.0,
}

# of the one-tile kernels, and others for short lengths, in those that are given
COMPILE_TILE: tuple[Case, ...] = (
    *(
        Case(f"{kind_of(*kind)} {d} tile {keys}", 64, 4, 4, keys, keys, d, d, *kind, bias="b11k")
        for kind in KINDS
        for keys, d in ((16, 16), (32, 64), (64, 16), (64, 64), (128, 16), (128, 32))
    ),
    *(
        Case(f"{kind_of(*kind)} 16 tile 64 {name}", 64, 4, 2, 64, 64, 16, 24, *kind, **options)
        for kind in (KINDS[0], KINDS[2])
        for name, options in (
            ("full", {}),
            ("bias bhqk", {"bias": "bhqk"}),
            ("bias bhq1 softcap", {"bias": "bhq1", "softcap": 20.0}),
            ("bias bool kv_lens", {"bias": "b1qk-bool", "kv_lens": True}),
            ("bias b11k window causal sinks", {"bias": "b11k", "window": (30, None), "causal": True, "sinks": True}),
        )
    ),
    *(  # many small ones: two in a program
        Case(f"{kind_of(*kind)} 16 tile 8 many", 2400, 4, 4, 8, 8, 16, 16, *kind, bias="b11k") for kind in KINDS
    ),
    *(  # few queries: 16 and 64 rows of a tile
        Case(f"{kind_of(*kind)} {d} few {rows}", 4, 16, 2, rows // 8, 4096, d, d, *kind, causal=True)
        for kind in KINDS
        for d in (64, 128, 256)
        for rows in (8, 64)
    ),
    *(
        Case(f"bf16 128 few {name}", 4, 16, 2, 2, 4096, 128, 96, BF16, **options)
        for name, options in (*_VARIANTS[:9], ("whole", {}), ("ragged", {"kv_lens": True, "sinks": True}))
    ),
    Case("bf16 64 few full", 4, 16, 2, 8, 512, 64, 64, BF16),
    *(Case(f"bf16 {d} one tile", 264, 4, 2, 128, 128, d, d, BF16) for d in (64, 128)),
    Case("bf16 128 one tile causal", 264, 4, 2, 128, 100, 128, 128, BF16, causal=True),
    *(Case(f"bf16 {d} short", 64, 4, 4, 512, 512, d, d, BF16) for d in (64, 128)),
    Case("bf16 64 short, kv_lens", 64, 4, 4, 512, 500, 64, 64, BF16, kv_lens=True, sinks=True),
    Case("bf16 128 one tile of 64", 264, 4, 2, 64, 64, 128, 128, BF16),
    Case("f16 96 one tile, window", 264, 4, 4, 100, 64, 96, 96, F16, window=(30, 20)),
    Case("bf16 32 whole heads", 64, 4, 4, 384, 384, 32, 32, BF16, bias="1hqk"),
    Case("bf16 32 whole heads, one part", 8, 16, 16, 384, 384, 32, 32, BF16, bias="1hqk"),
    Case("f16 32 whole heads of 380, one part", 8, 16, 16, 380, 380, 32, 32, F16, bias="1hqk"),
    Case("bf16 32 rows of 256", 256, 4, 4, 256, 256, 32, 32, BF16, bias="1hqk"),
    Case("f16 24 rows of 360", 64, 4, 4, 300, 360, 24, 32, F16, bias="11qk"),
    Case("bf16 32 rows", 64, 4, 4, 512, 512, 32, 32, BF16, bias="1hqk"),
    Case("bf16 32 rows of 1024", 16, 4, 4, 1024, 1024, 32, 32, BF16, bias="1hqk"),
    Case("bf16 32 eight rows", 8, 16, 16, 768, 768, 32, 32, BF16, bias="1hqk"),
    *(  # so many tiles that programs take them from a counter
        Case(f"bf16 {d} counted causal", 16, 8, 1, 1024, 1024, d, min(d, 128), BF16, causal=True)
        for d in (64, 96, 128, 192, 256)
    ),
    Case("bf16 128 window of whole blocks", 4, 8, 1, 1024, 1024, 128, 128, BF16, window=(255, 128)),
    Case("bf16 128 causal window of whole blocks", 4, 8, 1, 1024, 1024, 128, 128, BF16, window=(255, 0)),
    Case("tf32x3 32 rows", 64, 4, 4, 512, 512, 32, 32, F32, bias="1hqk"),
    Case("tf32x3 24 rows", 64, 4, 4, 525, 528, 24, 32, F32, bias="11qk"),
    Case("f16 24 rows", 64, 4, 4, 520, 528, 24, 32, F16, bias="11qk"),
    Case("bf16 32 whole heads f32 bias", 64, 4, 4, 512, 512, 32, 32, BF16, **_MOST_SHARED_MEMORY),
    Case("bf16 64 f32 bias", 4, 8, 8, 1024, 1024, 64, 64, BF16, bias="bhqk", bias_dtype=torch.float32),
    Case("bf16 128 f32 bias", 4, 8, 8, 1024, 1024, 128, 128, BF16, bias="bhqk", bias_dtype=torch.float32),
    Case("bf16 128 stored bias causal", 4, 8, 8, 1024, 1024, 128, 128, BF16, bias="bhqk", causal=True),
    Case("f16 64 stored bias", 4, 8, 8, 1024, 1024, 64, 64, F16, bias="bhqk"),
    *(Case(f"bf16 {d} ranges of {n}", 1, 1, 1, n, n, d, d, BF16) for d, n in ((32, 4096), (64, 2048), (128, 8192))),
    Case("bf16 24 whole heads causal", 64, 4, 4, 512, 512, 24, 32, BF16, bias="bhqk", causal=True),
)

# A thin selection for CI: each kernel, each kind of arithmetic, each option that changes much code once.
QUICK_CASES = (
    "bf16 64 full",
    "bf16 128 causal",
    "bf16 128 many heads causal",
    "bf16 256 causal",
    "tf32x3 64 full",
    "tf32 64 causal",
    "ieee 32 full",
    "bf16 64 bias 1hqk causal",
    "bf16 64 bias b11k",
    "bf16 64 window causal sinks",
    "bf16 64 varlen causal",
)
QUICK_TILES: tuple[str, ...] = (
    *("bf16 16 tile 64 full", "tf32x3 16 tile 64", "tf32x3 64 tile 32", "tf32x3 16 tile 8 many", "bf16 32 whole heads"),
    *("bf16 64 few full", "bf16 128 few 8", "bf16 32 rows", "tf32x3 32 rows", "bf16 64 one tile"),
    *("bf16 32 whole heads f32 bias", "bf16 64 f32 bias", "bf16 128 f32 bias"),
    *("bf16 128 stored bias causal", "f16 64 stored bias", "bf16 64 ranges of 2048", "bf16 128 ranges of 8192"),
)


def selection(quick: bool) -> tuple[Case, ...]:
    """The cases to compile: those of COMPILE, so long that kernels use what pays only at length (tensor descriptors),
    and those of COMPILE_TILE; then short and of odd lengths. Quick: those of QUICK_CASES and QUICK_TILES, only the
    first odd."""
    chosen = [case for case in COMPILE if not quick or case.name in QUICK_CASES]

    def resized(case: Case, factor: int, more: int) -> Case:
        seqlen_q, seqlen_k = (n * factor + more for n in (case.seqlen_q, case.seqlen_k))
        return case._replace(name=case.name + (" odd" if more else ""), seqlen_q=seqlen_q, seqlen_k=seqlen_k)

    long = [resized(case, 4 if case.bias else 8, 0) for case in chosen]
    tiles = [case for case in COMPILE_TILE if not quick or case.name in QUICK_TILES]
    odd = [case for case in chosen if not quick or case.name == QUICK_CASES[0]]
    return (*long, *tiles, *(resized(case, 1, -3) for case in odd))


def blank(case: Case) -> tuple[Callable[[], Problem], dict[str, tuple[Any, ...]]]:
    """What compiling a case needs: its problem, asked for under the device to compile for, and the arguments of each
    pass's launcher; results and cotangents are unwritten tensors of the right layout."""
    x, o, _ = api.inputs_of(**cases.make(case, "cpu"))
    bias_grad = x.bias is not None and x.bias.is_floating_point() and case.bias_grad
    out, lse = empty_out(x.q, x.v), empty_lse(x.q)
    moved = [empty_like(t) if t is not None and t.is_floating_point() else None for t in x[:5]]
    return lambda: problem(x, o, bias_grad), {
        "attention_fwd": (x, o),
        "attention_bwd": (x, o, out, lse, out, None, bias_grad),
        "attention_bwd_bwd": (x, o, out, lse, out, None, *moved, bias_grad),
        "attention_jvp": (x, o, out, lse, *moved),
    }
