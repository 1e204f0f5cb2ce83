"""`adatom bench --tune`: search tile configurations of the Triton kernels for the GPU at hand.

Candidates are compiled first, in parallel and without touching the GPU; those that spill or need too much shared memory
are dropped. The rest are timed side by side with the configuration in use, and must agree with it. The result is
printed as rows to review and to paste into the kernel files: nothing is searched while attention runs.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from rich.markup import escape
from rich.table import Table

from adatom import compile as offline
from adatom import registry
from adatom.bench.timing import Clock, Job, interleave
from adatom.ops.attention import cases
from adatom.ops.attention.api import inputs_of
from adatom.ops.attention.cases import BF16, F32, Case
from adatom.ops.attention.problem import Inputs, Options, empty_lse, empty_out

KINDS = ("half", "tf32", "tf32x3", "ieee")
DIMS = (64, 128, 256)


class Kernel(NamedTuple):
    """A tunable kernel: its name for `forcing`, the row that launches it, its table, and the bias that makes it run."""

    name: str
    op: str
    backend: str
    table: str
    bias: str = ""


KERNELS = (
    Kernel("fwd", "attention_fwd", "triton", "triton_fwd:CONFIGS"),
    Kernel("bwd_q", "attention_bwd", "triton", "triton_bwd:Q_CONFIGS"),
    Kernel("bwd_kv", "attention_bwd", "triton", "triton_bwd:KV_CONFIGS"),
    Kernel("bwd_bias", "attention_bwd", "triton", "triton_bwd:BIAS_CONFIGS", "1hqk"),
    Kernel("tangent", "attention_bwd_bwd", "triton", "triton_jvp:TANGENT_CONFIGS"),
    Kernel("bwd_bwd_q", "attention_bwd_bwd", "triton", "triton_bwd_bwd:Q_CONFIGS"),
    Kernel("bwd_bwd_kv", "attention_bwd_bwd", "triton", "triton_bwd_bwd:KV_CONFIGS"),
    Kernel("bwd_bwd_bias", "attention_bwd_bwd", "triton", "triton_bwd_bwd:BIAS_CONFIGS", "1hqk"),
)


class Key(NamedTuple):
    """One line of a kernel's table: the kernel, the kind of arithmetic, the largest head_dim that the line serves."""

    kernel: Kernel
    kind: str
    dim: int

    def __str__(self) -> str:
        return f"{self.kernel.name} {self.kind} {self.dim}"


class Found(NamedTuple):
    """The best configuration of a key beside the one in use: milliseconds of the whole pass, summed over the cases."""

    key: Key
    used: Any
    used_ms: float
    best: Any
    best_ms: float
    tried: int

    def line(self) -> str:
        """As it goes into the kernel file."""
        tma = ", tma=True" if self.best.tma else ""
        b = self.best
        row = (
            f'("{self.key.kind}", {self.key.dim}): Config({b.block_m}, {b.block_n}, {b.num_warps}, {b.num_stages}{tma})'
        )
        return f"{self.key.kernel.table.split(':')[1]}: {row},"


def keys(names: list[str]) -> list[Key]:
    """The keys that `names` ask for, each a kernel ("fwd"), or a kernel with kind and dim ("fwd half 64"); all if none.

    Raises ValueError for what does not exist.
    """
    known = [Key(k, kind, dim) for k in KERNELS for kind in KINDS for dim in DIMS]
    found = [key for key in known if not names or any(f"{key} ".startswith(f"{name} ") for name in names)]
    if not found:
        raise ValueError(f"nothing to tune called {', '.join(names)}; there are: {', '.join(k.name for k in KERNELS)}")
    return found


def candidates(key: Key, arch: int) -> list[Any]:
    """Configurations worth compiling: those whose accumulators can fit into registers."""
    from adatom.ops.attention.triton_call import Config

    half = key.kind == "half"
    tiles = (32, 64, 128) if half else (16, 32, 64, 128)
    stages = (2, 3, 4) if half and key.dim < 256 else (1, 2, 3) if key.kind in ("half", "tf32") else (1, 2)
    tma = (False, True) if half and arch >= 90 else (False,)
    found = []
    for m, n, warps, stage, by_tma in itertools.product(tiles, tiles, (4, 8), stages, tma):
        registers = m * n + max(m, n) * key.dim  # of float32: the scores and one accumulator
        if m * n >= 1024 and registers <= warps * 32 * 180:  # 255 a thread, some of them for operands
            found.append(Config(m, n, warps, stage, by_tma))
    return found


def sizes(key: Key) -> tuple[Case, ...]:
    """The cases that a configuration is judged on: long ones, with and without a causal mask."""
    half = key.kind == "half"
    seqlen, batch = (4096, 4) if half and not key.kernel.bias else (2048, 2)
    options: dict[str, Any] = {"dtype": BF16 if half else F32, "precision": None if half else key.kind}
    heads = max(1, (2048 if half else 1024) // key.dim)
    both = (False,) if key.kernel.bias else (False, True)
    shape = (batch, heads, heads, seqlen, seqlen, key.dim, key.dim)
    return tuple(Case(str(key), *shape, **options, bias=key.kernel.bias, causal=causal) for causal in both)


def _row(key: Key) -> registry.Row:
    return next(r for r in registry.rows(key.kernel.op) if r.backend == key.kernel.backend)


def _forced(key: Key, config: Any, call: Callable[[], Any]) -> Any:
    from adatom.ops.attention.triton_call import forcing

    with forcing(key.kernel.name, config):
        return call()


def _call(key: Key, x: Inputs, o: Options, real: bool) -> Callable[[], Any]:
    """The pass that runs the key's kernel. `real`: out and lse are computed and cotangents drawn, else unwritten."""
    launcher = registry.load(_row(key).target)
    if key.kernel.op == "attention_fwd":
        return partial(launcher, x, o)
    new = torch.randn_like if real else torch.empty_like
    out, lse = registry.load("attention.triton_fwd:forward")(x, o) if real else (empty_out(x.q, x.v), empty_lse(x.q))
    moved = [new(t) if t is not None else None for t in x[:5]]
    bias_grad = x.bias is not None
    if key.kernel.op == "attention_bwd":
        return partial(launcher, x, o, out, lse, new(out), None, bias_grad)
    return partial(launcher, x, o, out, lse, new(out), None, *moved, bias_grad)


def viable(key: Key, arch: int, tried: list[Any], jobs: int, advance: Callable[[], None] = lambda: None) -> list[Any]:
    """Those of the configurations that compile for `arch` without spills and fit into its shared memory.

    Compiling also fills Triton's cache, so that timing does not wait for it. No GPU is used.
    """
    collector = offline.Collector()
    known = [a for a in offline.DEVICES if a <= arch]
    bad: set[str] = set()
    for case in sizes(key):
        shape = (case.batch, case.heads, case.seqlen_q, case.head_dim)
        q, k, v = (torch.empty(shape, dtype=case.dtype) for _ in range(3))
        bias = None if case.bias_shape is None else torch.empty(case.bias_shape, dtype=case.dtype)
        x, o, _ = inputs_of(q, k, v, bias=bias, causal=case.causal, precision=case.precision)
        for i, config in enumerate(tried):
            run = partial(_forced, key, config, _call(key, x, o, real=False))
            try:
                collector.take(max(known), key.kernel.op, key.kernel.backend, str(i), run)
            except Exception:  # a launcher may refuse a tile
                bad.add(str(i))
    reports = offline.build_all(list(collector.specs.values()), jobs, lambda _: advance())
    bad |= {report.case for report in reports if report.failure is not None}
    return [config for i, config in enumerate(tried) if str(i) not in bad]


def search(key: Key, clock: Clock, tried: list[Any]) -> Found:
    """Time the configurations of a key beside the one in use; the few best again, for longer."""
    from adatom.ops.attention.triton_call import Call, pick

    module, name = key.kernel.table.split(":")
    table = getattr(importlib.import_module(f"adatom.ops.attention.{module}"), name)
    used: Any = None
    total: dict[Any, float] = {}
    for case in sizes(key):
        given = cases.make(case, clock.device)
        x, o, _ = inputs_of(**given)
        used = pick(key.kernel.name, table, Call(x, o))
        call = _call(key, x, o, real=True)
        expected = _forced(key, used, call)
        jobs = {used: _job(key, used, call)}
        for config in tried:
            try:
                if _agree(_forced(key, config, call), expected):
                    jobs[config] = _job(key, config, call)
            except Exception:  # out of some resource that only a launch reveals
                continue
        first = _times(jobs, clock, 10.0)
        best = [used, *sorted((c for c in first if c != used), key=first.__getitem__)[:5]]
        again = _times({c: jobs[c] for c in best if c in first}, clock, 80.0)
        times = first | again
        total = {c: times[c] + total.get(c, 0.0) for c in times if not total or c in total}
    winner = min(total, key=total.__getitem__)
    return Found(key, used, total[used], winner, total[winner], len(tried))


def _job(key: Key, config: Any, call: Callable[[], Any]) -> Job:
    def job() -> Iterator[str]:
        _forced(key, config, call)
        yield "pass"

    return job


def _times(jobs: dict[Any, Job], clock: Clock, milliseconds: float) -> dict[Any, float]:
    timed = interleave(jobs, clock, milliseconds, most=30, warmup=1)
    return {config: t["pass"].ms for config, t in timed.items() if not isinstance(t, Exception)}


def _agree(got: Any, expected: Any) -> bool:
    pairs = [(a, b) for a, b in zip(got, expected) if b is not None]
    return all(bool((a.float() - b.float()).norm() <= 2e-2 * b.float().norm()) for a, b in pairs)


def record(found: list[Found], device: str) -> dict[str, Any]:
    """What was found, for a JSON file."""
    return {
        "device": device,
        "tuned": [
            {
                "key": str(f.key),
                "table": f.key.kernel.table,
                "used": f.used._asdict(),
                "used_ms": f.used_ms,
                "best": f.best._asdict(),
                "best_ms": f.best_ms,
                "tried": f.tried,
            }
            for f in found
        ],
    }


def table(found: list[Found]) -> Table:
    """The configurations in use beside the best found, with the line to paste."""
    out = Table("kernel", "used", "ms", "best", "ms", "gain", "tried", "line")

    def tile(c: Any) -> str:
        return f"{c.block_m}x{c.block_n} {c.num_warps}w {c.num_stages}s{' tma' if c.tma else ''}"

    for f in found:
        gain = f"{f.used_ms / f.best_ms:.2f}x"
        times = (tile(f.used), f"{f.used_ms:.3f}", tile(f.best), f"{f.best_ms:.3f}")
        line = escape(f.line()) if f.best != f.used else "[dim]keep[/]"
        out.add_row(str(f.key), *times, gain, str(f.tried), line)
    return out
