"""Shapes, inputs, flops and bytes of moe: read by the tests, verify, bench and compile.

SMALL: tiny cases that together touch every option; seconds on a CPU. GPU, and QUICK among them: many tiles, odd sizes,
unequal experts, over 2**31 elements. COMPILE: cases that together reach every kernel configuration. BENCH, BENCH_CPU:
groups of cases to time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from adatom.ops.linear.problem import ACTIVATIONS
from adatom.ops.moe.api import moe_routed
from adatom.verify import generator

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


class Case(NamedTuple):
    """One call of `moe_routed`, without its tensors: x (*lead, hidden).

    routing: "even" chances for all experts; "skewed" ones, which leave some experts without tokens; "one" set of top_k
        experts for all tokens; "dropped": even, a quarter of the pairs dropped; "none": all of them; "twice": a token
        may name an expert twice.
    narrow: weights of x's dtype instead of float32 (float64 of float64). layout: "" for contiguous tensors, "x" and "w"
        for an x and experts cut out of larger ones, "t" for experts stored transposed. int32: of indices, else int64.
    small: values of act(gate) * up near the smallest that float16 holds; w_down is as much larger.
    """

    name: str
    lead: tuple[int, ...]
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    dtype: torch.dtype
    activation: str = "silu"
    recompute: bool = False
    routing: str = "even"
    narrow: bool = False
    layout: str = ""
    int32: bool = False
    small: bool = False

    @property
    def op(self) -> str:
        return "moe"

    @property
    def tokens(self) -> int:
        return torch.Size(self.lead).numel()

    @property
    def pairs(self) -> int:
        return self.tokens * self.top_k

    @property
    def largest(self) -> int:
        """Elements of its largest tensor."""
        experts = self.experts * 2 * self.intermediate * self.hidden
        return max(self.tokens * self.hidden, experts, self.pairs * 2 * self.intermediate)

    @property
    def huge(self) -> bool:
        return self.largest > 2**31


def make(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """The keyword arguments of `call(case)`: tensors on `device` without requires_grad, and the options.

    The same on every device for a given seed, but for cases of over 2**27 elements, which are drawn on the device.
    """
    device = torch.device(device)
    where = device if case.largest > 2**27 else torch.device("cpu")
    random = generator(case.name, seed, where)
    draw = torch.float32 if where.type == "cpu" else torch.bfloat16

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        drawn = torch.empty(shape, device=where, dtype=draw).normal_(generator=random)
        return drawn.mul_(scale).to(device, case.dtype)

    def experts(rows: int, columns: int, by: float = 1.0) -> torch.Tensor:
        scale, more = by * max(columns, 1) ** -0.5, 8 if "w" in case.layout else 0
        if "t" in case.layout:
            return normal(case.experts, columns, rows, scale=scale).mT
        return normal(case.experts, rows, columns + more, scale=scale)[..., more:]

    indices = _routing(case, random, where)
    weights = torch.rand(case.tokens, case.top_k, generator=random, device=where, dtype=torch.float32) + 0.1
    weights = weights / weights.sum(1, keepdim=True)
    more = 8 if "x" in case.layout else 0
    given: dict[str, Any] = {
        "x": normal(*case.lead, case.hidden + more, scale=0.005 if case.small else 1.0)[..., more:],
        "weights": weights.to(device, case.dtype if case.narrow or case.dtype == F64 else F32).view(
            *case.lead, case.top_k
        ),
        "indices": indices.to(device, torch.int32 if case.int32 else torch.int64).view(*case.lead, case.top_k),
        "w_gate_up": experts(2 * case.intermediate, case.hidden),
        "w_down": experts(case.hidden, case.intermediate, 1000.0 if case.small else 1.0),
    }
    if case.activation != "silu":
        given["activation"] = case.activation
    if case.recompute:
        given["recompute"] = True
    return given


def _routing(case: Case, random: torch.Generator, where: torch.device) -> torch.Tensor:
    shape = (case.tokens, case.experts)
    chances = torch.rand(shape, generator=random, device=where)
    if case.routing == "one":
        chances = chances[:1].expand(shape)
    if case.routing == "skewed":  # the last expert e has a chance of about 1 / e**2, and every third none
        places = torch.arange(case.experts, device=where)
        chances = chances * (1.0 + places) ** -2.0
        chances = torch.where((places % 3 == 2) & (case.experts > case.top_k + 2), -1.0, chances)
    if case.routing == "twice":
        return torch.randint(case.experts, (case.tokens, case.top_k), generator=random, device=where)
    indices = chances.topk(case.top_k, dim=1).indices
    if case.routing == "none":
        return torch.full_like(indices, case.experts)
    if case.routing == "dropped":
        nobody = torch.where(torch.rand(indices.shape, generator=random, device=where) < 0.5, -1, case.experts)
        return torch.where(torch.rand(indices.shape, generator=random, device=where) < 0.25, nobody, indices)
    return indices


def call(case: Case) -> Callable[..., Any]:
    """The public function that the case calls."""
    return moe_routed


def flops(case: Case, op: str) -> float:
    """Floating-point operations of a pass: two products forward; four backward, and one more where it recomputes."""
    one = 2 * case.pairs * case.intermediate * case.hidden  # a product with w_down; that with w_gate_up is two
    return 3 * one if op == "moe_fwd" else (8 if case.recompute else 6) * one


def bytes_moved(case: Case, op: str) -> float:
    """Bytes of a pass if it reads each argument and writes each result once; of the experts' weights those that tokens
    reach, as many as even chances let expect."""
    x, pre = case.tokens * case.hidden, 0 if case.recompute else case.pairs * 2 * case.intermediate
    routing = case.pairs * (4 + (case.dtype.itemsize if case.narrow else 4))
    expected = case.experts * (1 - (1 - case.top_k / case.experts) ** case.tokens)
    reached = {"one": case.top_k, "none": 0}.get(case.routing, expected)
    one = 3 * case.intermediate * case.hidden
    elements = 2 * x + pre + reached * one if op == "moe_fwd" else 3 * x + pre + (reached + case.experts) * one
    return case.dtype.itemsize * elements + routing


def _case(name: str, lead: int | tuple[int, ...], *numbers: Any, **options: Any) -> Case:
    return Case(name, (lead,) if isinstance(lead, int) else lead, *numbers, **options)


SMALL: tuple[Case, ...] = (
    _case("f64 even", (2, 9), 12, 10, 4, 2, F64),
    _case("f64 dropped", 21, 12, 10, 5, 3, F64, "gelu", routing="dropped"),
    *(_case(f"f32 {a}", 33, 24, 16, 6, 2, F32, a) for a in ACTIVATIONS),
    *(_case(f"bf16 {a}", 40, 32, 24, 6, 2, BF16, a) for a in ACTIVATIONS),
    _case("f16 even", 40, 32, 24, 6, 3, F16),
    _case("bf16 skewed", 50, 24, 32, 9, 2, BF16, routing="skewed"),
    _case("bf16 one", 50, 24, 32, 9, 2, BF16, routing="one"),
    _case("bf16 dropped", 50, 24, 32, 6, 3, BF16, routing="dropped"),
    _case("bf16 all dropped", 10, 24, 32, 6, 3, BF16, routing="none"),
    _case("bf16 twice", 40, 24, 32, 4, 3, BF16, routing="twice"),
    _case("bf16 top 1", 40, 24, 32, 6, 1, BF16),
    _case("bf16 all experts", 20, 24, 32, 5, 5, BF16),
    _case("f32 one expert", 20, 24, 16, 1, 1, F32),
    _case("bf16 recompute", 40, 32, 24, 6, 2, BF16, recompute=True),
    _case("f32 recompute gelu_tanh", 40, 32, 24, 6, 2, F32, "gelu_tanh", recompute=True, routing="dropped"),
    _case("bf16 narrow", 40, 32, 24, 6, 2, BF16, narrow=True),
    _case("f16 strides", (3, 11), 24, 16, 5, 2, F16, layout="xw"),
    _case("bf16 transposed", 30, 24, 16, 5, 2, BF16, layout="t"),
    _case("bf16 odd", 37, 13, 7, 5, 2, BF16),
    _case("bf16 one token", (), 32, 24, 6, 2, BF16),
    _case("bf16 one token recompute", (), 256, 24, 6, 2, BF16, recompute=True),
    _case("f16 one token dropped", 1, 264, 21, 6, 5, F16, "gelu", recompute=True, routing="dropped", layout="xw"),
    _case("bf16 no tokens", (0, 3), 32, 24, 6, 2, BF16),
    _case("bf16 512 experts", (2, 100), 16, 8, 512, 8, BF16),
)
GPU: tuple[Case, ...] = (
    *SMALL,
    *(_case(f"bf16 {a} 1000x520x264", 1000, 520, 264, 8, 2, BF16, a) for a in ACTIVATIONS),
    *(_case(f"f16 {a} 700x264x520", 700, 264, 520, 8, 2, F16, a) for a in ("silu", "gelu")),
    *(_case(f"bf16 {r} 1500x512x256", 1500, 512, 256, 16, 4, BF16, routing=r)
      for r in ("skewed", "one", "dropped", "none", "twice")),
    *(_case(f"bf16 recompute {r}", 1500, 512, 256, 16, 4, BF16, recompute=True, routing=r) for r in ("even", "skewed")),
    _case("bf16 fine", (4, 512), 512, 128, 128, 8, BF16),
    _case("bf16 fine narrow", 2048, 512, 128, 64, 8, BF16, narrow=True, routing="skewed"),
    _case("bf16 coarse", 4096, 512, 1024, 8, 2, BF16),
    _case("bf16 odd large", 777, 203, 107, 9, 3, BF16),
    _case("bf16 strides large", (3, 500), 512, 256, 8, 2, BF16, layout="xw"),
    _case("bf16 transposed large", 1200, 512, 256, 8, 2, BF16, layout="t"),
    *(_case(f"bf16 {n} tokens", n, 1024, 512, 64, 8, BF16) for n in (1, 4, 16, 64, 256)),
    _case("bf16 one token of 2048", 1, 2048, 768, 32, 8, BF16, recompute=True),
    _case("bf16 3 tokens", 3, 520, 1000, 9, 6, BF16, recompute=True, routing="dropped"),
    _case("f16 gelu 2 tokens", 2, 264, 520, 16, 4, F16, "gelu", recompute=True, int32=True),
    _case("bf16 gelu_tanh 3 tokens", 3, 512, 256, 16, 8, BF16, "gelu_tanh", recompute=True, narrow=True, layout="xw"),
    _case("bf16 relu 3 tokens top 1", 3, 2056, 768, 6, 1, BF16, "relu", recompute=True),
    _case("bf16 none 2 tokens twice", 2, 512, 256, 4, 4, BF16, "none", recompute=True, routing="twice", int32=True),
    _case("bf16 2 tokens dropped", 2, 512, 256, 16, 8, BF16, recompute=True, routing="none"),
    _case("f16 one token widest", 1, 72, 6656, 4, 1, F16, recompute=True),
    *(_case(f"f16 small {n} tokens", n, 512, 264, 16, 8, F16, recompute=True, small=True) for n in (2, 40)),
    _case("f16 strides large", 1200, 512, 256, 8, 2, F16, layout="xw"),
    _case("f32 large", 1000, 264, 520, 8, 2, F32),
    _case("f32 recompute large", 700, 264, 520, 8, 2, F32, "gelu", recompute=True, routing="skewed"),
    _case("bf16 huge", 65536 + 5, 64, 2056, 8, 8, BF16),
)  # fmt: skip
QUICK: tuple[Case, ...] = tuple(c for c in GPU if not c.huge)[::3]
COMPILE: tuple[Case, ...] = (
    *(_case(f"bf16 {a}", 4096, 512, 256, 16, 4, BF16, a) for a in ("silu", "gelu")),
    _case("bf16 recompute", 4096, 512, 256, 16, 4, BF16, recompute=True),
    _case("f16 silu", 4096, 512, 256, 16, 4, F16),
    *(_case(f"bf16 {n} tokens", n, 512, 256, 16, 4, BF16) for n in (16, 64)),
    _case("bf16 one token", 1, 512, 256, 16, 4, BF16, recompute=True),
    _case("bf16 3 tokens", 3, 512, 256, 16, 4, BF16, recompute=True),
    _case("bf16 one token 203x107", 1, 203, 107, 16, 4, BF16, recompute=True),
    _case("bf16 coarse", 8192, 512, 256, 8, 4, BF16),
    _case("bf16 384", 8192, 384, 384, 8, 4, BF16),
    *(_case(f"bf16 {n} tokens 320x192", n, 320, 192, 16, 4, BF16) for n in (16, 4096)),
    _case("bf16 odd", 777, 203, 107, 9, 3, BF16),
    _case("f32 silu", 1024, 256, 128, 8, 2, F32),
    _case("bf16 264", 1000, 520, 264, 8, 2, BF16),
    _case("bf16 512 experts", 4096, 128, 64, 512, 8, BF16),
    _case("bf16 one hidden", 40, 1, 32, 4, 2, BF16),
    _case("bf16 one intermediate", 40, 32, 1, 4, 2, BF16),
)
COMPILE_QUICK = ("bf16 silu", "bf16 16 tokens", "bf16 one token")

# (hidden, intermediate, experts, top_k) of Mixtral 8x7B, Qwen3-30B-A3B, DeepSeek-V3, and a shape of arXiv:2512.14080.
_MODELS = {
    "mixtral": (4096, 14336, 8, 2),
    "qwen3": (2048, 768, 128, 8),
    "deepseek": (7168, 2048, 256, 8),
    "fine": (4096, 1024, 128, 8),
}


def _bench(model: str, tokens: int, **options: Any) -> Case:
    return _case(f"{model} {tokens} tokens", tokens, *_MODELS[model], BF16, **options)


BENCH: dict[str, tuple[Case, ...]] = {
    "moe": (_bench("mixtral", 8192), _bench("qwen3", 8192), _bench("deepseek", 4096), _bench("fine", 32768)),
    "moe_decode": tuple(
        _bench(model, tokens) for model in ("mixtral", "qwen3", "deepseek") for tokens in (1, 16, 64, 256)
    ),
    "moe_skewed": (_bench("qwen3", 8192, routing="skewed"),),
}
BENCH_CPU: dict[str, tuple[Case, ...]] = {"moe": (_case("moe 512 tokens", 512, 128, 96, 8, 2, F32),)}
