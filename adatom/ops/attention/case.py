"""A case of attention: what describes a call, its tensors, its flops and bytes. Which there are stands in cases.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from adatom.ops.attention.api import attention, attention_varlen
from adatom.verify import generator

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


class Case(NamedTuple):
    """One call of attention, without its tensors.

    bias: "" for none, else four letters, one for each dimension of the scores, "1" where it broadcasts: "bhqk", "1hqk",
        "b11k", ..., or "2" first for two slices, each for half of the batch; then "-inf" (30 % of the entries and one
        whole row masked), "-bool" (True attends) or "-far" (the first third of the keys and 30 % of the entries masked
        by -1e9, or what float16 has) or "-lowest" (by the lowest finite number).
    kv_lens: lengths of keys at random, one of them 0 and one full. varlen: the packed form; sequence lengths at random
        up to seqlen_q and seqlen_k, with an empty sequence and one of a single token where there are four or more.
    layout: memory order of q, k, v: "bhsd", "bshd", or "apart", with rows of odd steps. magnitude: deviation of q.
    bias_dtype: dtype of the bias and the sinks; None is that of q. bias_grad: whether a float bias wants its gradient.
    """

    name: str
    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    precision: str | None = None
    bias: str = ""
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    sinks: bool = False
    kv_lens: bool = False
    varlen: bool = False
    scale: float | None = None
    layout: str = "bhsd"
    magnitude: float = 1.0
    bias_dtype: torch.dtype | None = None
    bias_grad: bool = True

    @property
    def op(self) -> str:
        """The op that the case is of."""
        return "attention"

    @property
    def bias_shape(self) -> tuple[int, ...] | None:
        """Shape of the bias: the scores' (batch, heads, seqlen_q, seqlen_k), or 1, dimension by dimension."""
        sizes = {"b": self.batch, "h": self.heads, "q": self.seqlen_q, "k": self.seqlen_k, "1": 1, "2": 2}
        return tuple(sizes[letter] for letter in self.bias[:4]) if self.bias else None

    @property
    def elements(self) -> int:
        """Those of its largest tensor."""
        bias = 0 if self.bias_shape is None else torch.Size(self.bias_shape).numel()
        q = self.batch * self.heads * self.seqlen_q * max(self.head_dim, self.head_dim_v)
        kv = self.batch * self.kv_heads * self.seqlen_k * max(self.head_dim, self.head_dim_v)
        return max(q, kv, bias)

    @property
    def huge(self) -> bool:
        """Whether one of its tensors has more than 2**31 elements."""
        return self.elements > 2**31


def lengths(case: Case, seed: int = 0) -> tuple[list[int], list[int]]:
    """Queries and keys of each sequence of a packed case (batch of them); equal if seqlen_q == seqlen_k."""
    random = torch.Generator().manual_seed(seed + 1)
    ks = torch.randint(1, case.seqlen_k + 1, (case.batch,), generator=random).tolist()
    qs = ks
    ks[-1] = case.seqlen_k
    if case.seqlen_q != case.seqlen_k:
        qs = torch.randint(1, case.seqlen_q + 1, (case.batch,), generator=random).tolist()
        qs[-1] = case.seqlen_q
    if case.batch >= 4:
        ks[0], ks[1] = 0, 1
        if qs is not ks:
            qs[1], qs[2] = 1, 0
    return list(qs), list(ks)


def make(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """The keyword arguments of `call(case)`: tensors on `device` without requires_grad, and the options.

    The same on every device for a given seed, but for cases of over 2**30 elements, which are drawn on the device.
    """
    device = torch.device(device)
    where = device if case.elements > 2**30 else torch.device("cpu")
    random = generator(case.name, seed, where)
    draw = torch.bfloat16 if case.huge else torch.float32

    def normal(*shape: int, dtype: torch.dtype = case.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=random, device=where, dtype=draw).to(device=device, dtype=dtype)

    def rows(heads: int, seqlen: int, dim: int) -> torch.Tensor:
        if case.layout == "bshd":
            return normal(case.batch, seqlen, heads, dim).transpose(1, 2)
        if case.layout == "apart":
            return normal(case.batch, heads, seqlen, dim + 1)[..., :dim]
        return normal(case.batch, heads, seqlen, dim)

    given: dict[str, Any] = {}
    if case.varlen:
        qs, ks = lengths(case, seed)
        given["q"] = normal(sum(qs), case.heads, case.head_dim)
        given["k"] = normal(sum(ks), case.kv_heads, case.head_dim)
        given["v"] = normal(sum(ks), case.kv_heads, case.head_dim_v)
        ends = [torch.tensor([0, *each]).cumsum(0).to(device=device, dtype=torch.int32) for each in (qs, ks)]
        given["cu_seqlens_q"], given["cu_seqlens_k"] = ends if qs != ks else ends[:1] * 2  # as one gives the same twice
    else:
        given["q"] = rows(case.heads, case.seqlen_q, case.head_dim)
        given["k"] = rows(case.kv_heads, case.seqlen_k, case.head_dim)
        given["v"] = rows(case.kv_heads, case.seqlen_k, case.head_dim_v)
    if case.magnitude != 1.0:
        given["q"] = given["q"] * case.magnitude
    other = case.bias_dtype or case.dtype
    if case.bias_shape is not None:
        bias = normal(*case.bias_shape, dtype=other)
        if case.bias.endswith(("-inf", "-bool")):
            masked = torch.rand(case.bias_shape, generator=random, device=where) < 0.3
            masked[-1, -1, -1] = True  # the last row has nothing to attend to
            masked = masked.to(device)
            bias = ~masked if case.bias.endswith("-bool") else bias.masked_fill_(masked, float("-inf"))
        if case.bias.endswith(("-far", "-lowest")):
            far = torch.rand(case.bias_shape, generator=random, device=where) < 0.3
            far |= torch.arange(case.bias_shape[3], device=where) < case.seqlen_k // 3
            far[..., -1] = False  # every row has something to attend to
            lowest = torch.finfo(other).min
            bias = bias.masked_fill_(far.to(device), lowest if case.bias.endswith("lowest") else max(-1e9, lowest))
        given["bias"] = bias
    if case.sinks:
        given["sinks"] = normal(case.heads, dtype=other)
    if case.kv_lens:
        lens = torch.randint(1, case.seqlen_k + 1, (case.batch,), generator=torch.Generator().manual_seed(seed))
        if case.batch > 1:
            lens[0], lens[-1] = 0, case.seqlen_k
        given["kv_lens"] = lens.to(device=device, dtype=torch.int32)
    for name in ("causal", "window", "softcap", "scale", "precision"):
        value = getattr(case, name)
        if value is not None:
            given[name] = value
    return given


def call(case: Case) -> Callable[..., Any]:
    """The public function that the case calls."""
    return attention_varlen if case.varlen else attention


def _pairs(case: Case) -> float:
    """Query-key pairs of one head, over the batch. Causal counts half of the square, as everybody counts it."""
    qs, ks = lengths(case) if case.varlen else ([case.seqlen_q] * case.batch, [case.seqlen_k] * case.batch)
    if case.window is None:
        return sum(a * b for a, b in zip(qs, ks)) / (2 if case.causal else 1)
    left, right = (n if w in (None, -1) else w for w, n in zip(case.window, (case.seqlen_k, case.seqlen_k)))
    right = min(right, 0) if case.causal else right
    total = 0
    for n_q, n_k in set(zip(qs, ks)):
        i = torch.arange(n_q) + n_k - n_q
        seen = (i + right).clamp(max=n_k - 1) - (i - left).clamp(min=0) + 1
        total += int(seen.clamp(min=0).sum()) * list(zip(qs, ks)).count((n_q, n_k))
    return float(total)


def flops(case: Case, op: str) -> float:
    """Floating-point operations of a pass: each distinct matrix product of the formulas once, however often a kernel
    repeats it. That is 2 products for the forward, 5 for backward and jvp, 12 for the double backward."""
    products = {"attention_fwd": 2, "attention_bwd": 5, "attention_bwd_bwd": 12, "attention_jvp": 5}[op]
    return products * case.heads * _pairs(case) * (case.head_dim + case.head_dim_v)


def bytes_moved(case: Case, op: str) -> float:
    """Bytes of a pass if it reads each argument and writes each result once."""
    if case.varlen:
        n_q, n_k = (sum(n) for n in lengths(case))
    else:
        n_q, n_k = case.batch * case.seqlen_q, case.batch * case.seqlen_k
    size = case.dtype.itemsize
    q, out = (n_q * case.heads * d * size for d in (case.head_dim, case.head_dim_v))
    kv = n_k * case.kv_heads * (case.head_dim + case.head_dim_v) * size
    lse = n_q * case.heads * (8 if case.dtype == F64 else 4)
    bias = dbias = 0
    if case.bias_shape is not None:
        boolean = case.bias.endswith("-bool")
        bias = torch.Size(case.bias_shape).numel() * (1 if boolean else (case.bias_dtype or case.dtype).itemsize)
        dbias = 0 if boolean or not case.bias_grad else bias
    inputs, grads = q + kv + bias, q + kv + dbias
    return {
        "attention_fwd": inputs + out + lse,
        "attention_bwd": inputs + 2 * out + lse + grads,
        "attention_bwd_bwd": inputs + 2 * out + lse + 2 * grads + out + lse,
        "attention_jvp": inputs + out + lse + grads + out + lse,
    }[op]
