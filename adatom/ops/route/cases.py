"""Shapes, inputs and bytes of routing: read by the tests, verify, bench and compile.

SMALL: tiny cases that together touch every option; seconds on a CPU. GPU, and QUICK among them: many tokens, odd
numbers, over 2**31 elements. COMPILE: cases that together reach every kernel configuration. BENCH, BENCH_CPU: groups of
cases to time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from adatom.ops.route.api import moe_route
from adatom.verify import generator

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


class Case(NamedTuple):
    """One call of `moe_route`, without its tensors: router_logits (*lead, experts).

    biased: a selection bias. barred: it is -inf for every fourth expert, and for all but the last of the first quarter.
    layout: "" for contiguous logits, "cut" for some columns of a wider tensor, "t" for logits stored transposed; a bias
    is then every other number of a longer one. ties: logits of few values, some of them -0. masked: a third of the
    logits is -inf. low: a quarter of the tokens has sigmoids of 0.
    """

    name: str
    lead: tuple[int, ...]
    experts: int
    top_k: int
    dtype: torch.dtype
    scoring: str = "softmax"
    renormalize: bool = True
    biased: bool = False
    groups: tuple[int, ...] | None = None
    scale: float = 1.0
    layout: str = ""
    ties: bool = False
    masked: bool = False
    barred: bool = False
    low: bool = False

    @property
    def op(self) -> str:
        return "route"

    @property
    def tokens(self) -> int:
        return torch.Size(self.lead).numel()

    @property
    def huge(self) -> bool:
        return self.tokens * self.experts > 2**31


def make(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """The keyword arguments of `call(case)`: tensors on `device` without requires_grad, and the options.

    The same on every device for a given seed, but for cases of over 2**31 elements, which are drawn on the device.
    """
    device = torch.device(device)
    where = device if case.huge else torch.device("cpu")
    random = generator(case.name, seed, where)
    more = 8 if case.layout == "cut" else 0
    shape = (case.experts, *case.lead) if case.layout == "t" else (*case.lead, case.experts + more)
    logits = torch.randn(shape, generator=random, device=where, dtype=BF16 if case.huge else F32)
    if case.ties:
        logits = logits.mul_(2).round_().div_(2)
    if case.low:
        logits[: len(logits) // 4] -= 1e4
    if case.masked:
        logits = logits.masked_fill_(torch.rand(shape, generator=random, device=where) < 1 / 3, -torch.inf)
    logits = logits.to(device, case.dtype)
    given: dict[str, Any] = {"router_logits": logits.movedim(0, -1) if case.layout == "t" else logits[..., more:]}
    if case.biased:
        step = 2 if case.layout else 1
        bias = torch.randn(step * case.experts, generator=random, device=where).mul_(0.1).to(device)[::step]
        if case.barred:
            bias[::4] = bias[: case.experts // 4 - 1] = -torch.inf
        given["selection_bias"] = bias
    options = {"scoring": "softmax", "renormalize": True, "groups": None, "scale": 1.0}
    changed = {name: getattr(case, name) for name, usual in options.items() if getattr(case, name) != usual}
    return given | {"top_k": case.top_k} | changed


def _weights(*args: Any, **kwargs: Any) -> torch.Tensor:
    return moe_route(*args, **kwargs)[0]


def call(case: Case) -> Callable[..., Any]:
    """The public function that the case calls; of its results the weights, which float."""
    return _weights


def flops(case: Case, op: str) -> float:
    """Floating-point operations, roughly: it is bytes that count."""
    return 5 * case.tokens * case.experts


def bytes_moved(case: Case, op: str) -> float:
    """Bytes if logits are read once and weights and indices written once."""
    wide = 8 if case.dtype == F64 else 4
    return case.tokens * (case.experts * case.dtype.itemsize + case.top_k * (wide + 8))


def _case(name: str, lead: int | tuple[int, ...], *numbers: Any, **options: Any) -> Case:
    return Case(name, (lead,) if isinstance(lead, int) else lead, *numbers, **options)


_V3 = {"scoring": "sigmoid", "biased": True, "groups": (8, 4), "scale": 2.5}  # as DeepSeek-V3 routes
_V2 = {"renormalize": False, "groups": (8, 3, 1), "scale": 16.0}  # as DeepSeek-V2 does

SMALL: tuple[Case, ...] = (
    _case("f64", (3, 5), 6, 2, F64),
    _case("f64 groups", 12, 12, 3, F64, groups=(4, 2), scoring="sigmoid", biased=True),
    _case("f32", 37, 8, 2, F32),
    _case("bf16", (4, 9), 16, 4, BF16),
    _case("f16", 21, 40, 8, F16),
    _case("bf16 not renormalized", 21, 40, 8, BF16, renormalize=False),
    _case("f32 sigmoid", 21, 12, 3, F32, scoring="sigmoid"),
    _case("bf16 sigmoid not renormalized", 21, 12, 3, BF16, scoring="sigmoid", renormalize=False, scale=0.5),
    _case("f32 bias", 21, 12, 3, F32, biased=True),
    _case("f32 bias not renormalized", 21, 12, 3, F32, biased=True, renormalize=False),
    _case("bf16 bias of sigmoid", 21, 24, 5, BF16, biased=True, scoring="sigmoid"),
    _case("f32 V3", 20, 64, 8, F32, **_V3),
    _case("f32 V2", 20, 64, 6, F32, **_V2),
    _case("f32 groups of softmax", 20, 16, 3, F32, groups=(4, 2, 3)),
    _case("f32 groups of one", 20, 16, 5, F32, groups=(16, 5)),
    _case("f32 one group", 20, 16, 5, F32, groups=(1, 1), scoring="sigmoid"),
    _case("bf16 ties", 40, 48, 8, BF16, ties=True),
    _case("f32 ties of sigmoid", 40, 48, 8, F32, ties=True, scoring="sigmoid"),
    _case("f32 masked", 40, 48, 4, F32, masked=True),
    _case("f32 masked sigmoid", 40, 48, 32, F32, masked=True, scoring="sigmoid", renormalize=False),
    _case("f32 groups with ties", 40, 32, 5, F32, groups=(8, 3), ties=True, scoring="sigmoid"),
    _case("f32 softmax groups with ties", 40, 32, 5, F32, groups=(8, 3, 1), ties=True, renormalize=False),
    _case("f32 barred groups", 40, 32, 8, F32, groups=(8, 7), biased=True, barred=True, scoring="sigmoid"),
    _case("f32 barred", 40, 32, 20, F32, biased=True, barred=True),
    _case("f32 low", 40, 32, 4, F32, scoring="sigmoid", low=True),
    _case("bf16 cut", 21, 24, 4, BF16, layout="cut"),
    _case("f32 cut bias", 21, 24, 4, F32, layout="cut", biased=True, scoring="sigmoid"),
    _case("f32 transposed", (3, 7), 24, 4, F32, layout="t"),
    _case("bf16 all experts", 21, 7, 7, BF16),
    _case("f32 one expert", 9, 1, 1, F32, renormalize=False),
    _case("bf16 one token", (), 130, 8, BF16),
    _case("bf16 no tokens", (0, 3), 8, 2, BF16),
)
GPU: tuple[Case, ...] = (
    *SMALL,
    *(_case(f"{n} {tokens}x{e} top {k}", tokens, e, k, d)
      for n, d in (("bf16", BF16), ("f32", F32))
      for tokens, e, k in ((1, 128, 8), (3, 512, 10), (700, 1024, 32), (5000, 8, 2), (40000, 128, 8), (9000, 384, 6))),
    *(_case(f"f32 {e} softmax", 3000, e, 4, F32, renormalize=False) for e in (60, 64, 160, 512)),
    *(_case(f"f32 {e} V3", tokens, e, 8, F32, **_V3) for tokens, e in ((1, 256), (2000, 256), (999, 128), (500, 1024))),
    _case("bf16 V3", 2000, 256, 8, BF16, **_V3),
    _case("f32 V2 large", 2000, 128, 6, F32, **_V2),
    _case("f32 groups by eight", 2000, 128, 6, F32, groups=(4, 2, 8), scoring="sigmoid"),
    _case("f32 groups of 3", 2000, 96, 6, F32, groups=(3, 2), scoring="sigmoid"),
    _case("f32 bias of 200", 2000, 200, 8, F32, biased=True, scoring="sigmoid"),
    _case("bf16 ties large", 5000, 128, 8, BF16, ties=True),
    _case("f16 masked large", 5000, 128, 8, F16, masked=True),
    _case("bf16 cut large", (3, 999), 120, 8, BF16, layout="cut"),
    _case("bf16 transposed large", (5, 700), 128, 8, BF16, layout="t"),
    _case("f32 2000 experts", 100, 2000, 8, F32),
    _case("bf16 huge", 2**24 + 5, 136, 2, BF16),
    _case("bf16 huge transposed", 2**24 + 5, 136, 2, BF16, layout="t"),
)  # fmt: skip
QUICK: tuple[Case, ...] = tuple(c for c in GPU if not c.huge)[::3]
COMPILE: tuple[Case, ...] = (
    *(_case(f"{n} {tokens}x{e}", tokens, e, k, d)
      for n, d in (("bf16", BF16), ("f32", F32))
      for tokens, e, k in ((1, 128, 8), (32768, 8, 2), (32768, 128, 8), (4096, 1024, 32))),
    _case("f16 100", 4096, 100, 6, F16, renormalize=False),
    _case("f32 V3", 4096, 256, 8, F32, **_V3),
    _case("f32 V3 one token", 1, 256, 8, F32, **_V3),
    _case("bf16 V2", 4096, 160, 6, BF16, **_V2 | {"groups": None}),
    _case("f32 bias", 4096, 64, 6, F32, biased=True),
    _case("f32 groups", 4096, 64, 6, F32, groups=(8, 3, 1), renormalize=False),
)  # fmt: skip
COMPILE_QUICK = ("bf16 32768x128", "f32 V3")

# (experts, top_k) as Mixtral 8x7B, Qwen3-30B-A3B and DeepSeek-V3 route; the last from float32 logits.
_MODELS: dict[str, tuple[int, int, torch.dtype, dict[str, Any]]] = {
    "mixtral": (8, 2, BF16, {}),
    "qwen3": (128, 8, BF16, {}),
    "deepseek": (256, 8, F32, _V3),
}


def _bench(model: str, tokens: int) -> Case:
    experts, top_k, dtype, options = _MODELS[model]
    return _case(f"{model} {tokens} tokens", tokens, experts, top_k, dtype, **options)


BENCH: dict[str, tuple[Case, ...]] = {
    "route": tuple(_bench(model, tokens) for model in _MODELS for tokens in (1, 64, 8192, 65536)),
}
BENCH_CPU: dict[str, tuple[Case, ...]] = {"route": (_case("route 512 tokens", 512, 64, 4, F32),)}
