"""Time adatom and its rivals on bench cases, interleaved, and gather everything in one record."""

from __future__ import annotations

import datetime
import json
import math
import platform
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention

from adatom import device as machine
from adatom import evidence, registry, verify
from adatom.bench import science
from adatom.bench.rivals import OWN, Bind, Call, Unfit, contest, every, installed
from adatom.bench.timing import Clock, Job, ceilings, host_microseconds, interleave, peak_bytes, tf32
from adatom.device import facts
from adatom.ops.attention.api import attention
from adatom.records import commit
from adatom.registry import Row

Tensor = torch.Tensor
# The PyTorch path to compare with at full size. The reference of attention needs too much memory there; that of linear
# rounds before it adds the bias, which turns the sign of enough values for relu to tell.
_PLAIN = {"attention": "torch_chunked", "linear": "torch"}
_SUFFIX = {"forward": "fwd", "backward": "bwd", "double backward": "bwd_bwd", "forward mode": "jvp"}


def op_pass(case: Any, kind: str) -> str:
    """The name in the registry of a pass: "attention_bwd" for "backward"."""
    return f"{case.op}_{_SUFFIX[kind]}"


def passes(group: str, case: Any) -> tuple[str, ...]:
    """What is timed."""
    found: tuple[str, ...] = contest(case.op).passes(group, case)
    return found


def _tensors(case: Any, given: dict[str, Any]) -> dict[str, Tensor]:
    """What contenders take, by name."""
    return {name: given[name] for name in contest(case.op).TENSORS if given.get(name) is not None}


def _leaves(case: Any, given: dict[str, Any]) -> dict[str, Tensor]:
    """The same, requiring gradients where the case wants them."""
    frozen = () if getattr(case, "bias_grad", True) else ("bias",)
    plain = _tensors(case, given)
    return {n: x if n in frozen else x.detach().requires_grad_(x.is_floating_point()) for n, x in plain.items()}


def ours(case: Any, given: dict[str, Any], backend: str | None = None) -> Call:
    """adatom as a function of the op's TENSORS."""
    function, names = registry.part(case.op, "cases").call(case), list(_tensors(case, given))
    options = {name: value for name, value in given.items() if name not in names}

    def call(*tensors: Tensor) -> Any:
        return function(**dict(zip(names, tensors)), **options, backend=backend)

    return call


def chosen(case: Any, given: dict[str, Any], order: tuple[str, ...], backend: str | None = None) -> dict[str, Row]:
    """The row that adatom chooses for each pass."""
    given = given | _leaves(case, given)
    found = {v.op: v.backend for v in registry.explain(case.op, **given, backend=backend) if v.chosen}
    wanted = {name: op_pass(case, name) for name in order}
    return {name: row for name, op in wanted.items() for row in registry.rows(op) if row.backend == found.get(op)}


def _flat(out: Any) -> list[Tensor]:
    """The tensors of a result, which may be one or several."""
    return [out] if isinstance(out, Tensor) else list(out)


def _memory(device: torch.device) -> float:
    """Bytes of a GPU; a CPU's do not count."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else math.inf


def _lay_out(given: dict[str, Any], tensors: dict[str, Tensor]) -> Callable[[str, float], Tensor] | None:
    """Where inputs of the shape of the first take a sixth of a GPU, so that cotangents of them all would leave no room:
    lays them one behind another, in `given`. Returns a function of the name of one (others stand for the first) and a
    share of a batch, which gives what lies so much further on: as random, and not what a kernel reads beside it."""
    first = next(iter(tensors.values()))
    names = [n for n, x in tensors.items() if x.shape == first.shape and x.dtype == first.dtype and x.is_contiguous()]
    if len(names) * first.nbytes <= _memory(first.device) / 6:
        return None
    n = len(first)
    pool = first.new_empty((len(names) * n + n // 2, *first.shape[1:]))
    for i, name in enumerate(names):
        pool[i * n : (i + 1) * n] = tensors.pop(name)
        given[name] = pool[i * n : (i + 1) * n]
    pool[len(names) * n :] = pool[: n // 2]

    def further(name: str, share: float) -> Tensor:
        start = n * names.index(name) if name in names else 0
        return pool[start + int(share * n) :][:n]

    return further


class Problem:
    """The tensors of a case, and the jobs that time one contender on them."""

    def __init__(self, case: Any, device: torch.device):
        self.case, self.given = case, registry.part(case.op, "cases").make(case, device)
        self._further = _lay_out(self.given, _tensors(case, self.given))
        self.plain = list(_tensors(case, self.given).values())
        leaves = _leaves(case, self.given)
        self.leaves, self.names = list(leaves.values()), [n for n, x in leaves.items() if x.requires_grad]
        self.wanted = [leaves[n] for n in self.names]
        self._douts: list[Tensor] = []
        self._cotangents: list[Tensor] | None = None

    def douts(self, out: Any, requires_grad: bool = False) -> list[Tensor]:
        """Random cotangents of the results `out`, drawn when first needed."""
        self._douts = self._douts or [self._random(x, 0.25) for x in _flat(out)]
        return [x.detach().requires_grad_(requires_grad) for x in self._douts]

    @property
    def cotangents(self) -> list[Tensor]:
        """Random cotangents of the first derivatives, drawn when first needed."""
        if self._cotangents is None:
            self._cotangents = [self._random(x, 0.5, n) for n, x in zip(self.names, self.wanted)]
        return self._cotangents

    def _random(self, like: Tensor, share: float, name: str = "") -> Tensor:
        """A random tensor like this one; where inputs fill the device, of theirs."""
        found = self._further(name, share) if self._further else None
        return found if found is not None and found.shape == like.shape else torch.randn_like(like)

    def results(self, call: Call, order: tuple[str, ...]) -> dict[str, Tensor]:
        """What a contender computes in these passes: its results, their gradients, theirs, the tangent."""
        first, second = "backward" in order, "double backward" in order
        with torch.set_grad_enabled(first):
            out = _flat(call(*self.leaves))
        found = {f"out{i or ''}": x.detach() for i, x in enumerate(out)}
        if "forward mode" in order:
            found["tangent of out"] = self.tangent(call)
        if first:
            douts = self.douts(out, second)
            grads = torch.autograd.grad(out, self.wanted, douts, create_graph=second)
            found |= {f"d{name}": g.detach() for name, g in zip(self.names, grads)}
        if second:
            seconds = torch.autograd.grad(grads, [*self.wanted, *douts], self.cotangents)
            found |= {f"d{name} of the gradients": g for name, g in zip([*self.names, "out"], seconds)}
        return found

    def forward(self, call: Call) -> Job:
        def job() -> Iterator[str]:
            with torch.no_grad():
                call(*self.plain)
            yield "forward"

        return job

    def backward(self, call: Call) -> Job:
        out = _flat(call(*self.leaves))
        douts = self.douts(out)

        def job() -> Iterator[str]:
            torch.autograd.grad(out, self.wanted, douts, retain_graph=True)
            yield "backward"

        return job

    def step(self, call: Call) -> Job:
        """Forward and backward from scratch, for the memory of both."""
        with torch.no_grad():
            douts = self.douts(call(*self.plain))

        def job() -> Iterator[str]:
            out = _flat(call(*self.leaves))
            yield "forward"
            torch.autograd.grad(out, self.wanted, douts)
            yield "backward"

        return job

    def tangent(self, call: Call) -> Tensor:
        """The tangent of out, along random tangents of the inputs."""
        with torch.no_grad(), forward_ad.dual_level():
            duals = [forward_ad.make_dual(x.detach(), t) for x, t in zip(self.wanted, self.cotangents)]
            tangent: Tensor = forward_ad.unpack_dual(call(*duals)).tangent
        return tangent

    def forward_mode(self, call: Call) -> Job:
        """A forward that carries tangents of all inputs."""

        def job() -> Iterator[str]:
            self.tangent(call)
            yield "forward mode"

        return job

    def second(self, call: Call) -> Job:
        """All three orders in one step; the last differentiates the gradients by the inputs and by dout."""
        with torch.no_grad():
            douts = self.douts(call(*self.plain), requires_grad=True)

        def job() -> Iterator[str]:
            out = _flat(call(*self.leaves))
            yield "forward"
            grads = torch.autograd.grad(out, self.wanted, douts, create_graph=True)
            yield "backward"
            torch.autograd.grad(grads, [*self.wanted, *douts], self.cotangents)
            yield "double backward"

        return job


def reason(error: BaseException, heard: list[str] | None = None) -> str:
    """Why a contender has no time, in one line. `heard`: warnings that came before, where SDPA explains itself."""
    lines = [line.strip() for line in str(error).strip().split("\n")]
    text = " ".join(lines) if lines[0].startswith("adatom:") else lines[0]
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    if "No available kernel" in text and heard:
        said = [h.split(" (Triggered")[0] for h in heard]
        text = next((h for h in said if "not used because" not in h and "disabled" not in h), text)
    text = text if len(text) <= 240 else text[:237] + "..."
    return text if isinstance(error, Unfit) else f"{type(error).__name__}: {text}" if text else type(error).__name__


def _tolerance(case: Any) -> float:
    """Relative L2 distance beyond which two results of this precision are not the same function."""
    if case.dtype in (torch.float16, torch.bfloat16):
        return 3e-2
    return 1e-2 if _tf32(case) else 1e-3


def _tf32(case: Any) -> bool:
    return getattr(case, "precision", None) == "tf32"


def compare(
    problem: Problem,
    group: str,
    contenders: dict[str, Bind],
    clock: Clock,
    peaks: dict[str, float],
    milliseconds: float = 80.0,
    backend: str | None = None,
    refused: str | None = None,
) -> list[dict[str, Any]]:
    """Entries for one case: adatom and the contenders side by side.

    contenders: name -> bind(case, given). peaks: the ceilings, for the share of them that is reached. refused: why
    adatom may show no speed here. An entry is {group, case, pass, contender, ms, spread [p20, p80], repeats, tflops,
    gbps, bound, share, peak_bytes}; a contender that fails has {group, case, pass, contender, reason} instead.
    """
    case, given = problem.case, problem.given
    calls: dict[str, Call] = {}
    failures: dict[str, dict[str, str]] = {"adatom": {"all": refused}} if refused else {}
    expected: list[Tensor] | None = None
    binds: dict[str, Bind] = {"adatom": lambda case, given: ours(case, given, backend), **contenders}
    with tf32(_tf32(case)), torch.no_grad():
        for name in [name for name in binds if name not in failures]:
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                try:
                    call = binds[name](case, given)
                    if name == "adatom":
                        expected = _flat(call(*problem.plain))
                    elif expected is not None:
                        _same(_flat(call(*problem.plain)), expected, _tolerance(case))
                    calls[name] = call
                except Exception as error:
                    failures[name] = {"all": reason(error, [str(h.message) for h in heard])}
        expected = None
    order = passes(group, case)
    three_orders = "double backward" in order
    timings: dict[str, dict[str, Any]] = {name: {} for name in calls}
    memory: dict[str, dict[str, int | None]] = {name: {} for name in calls}
    with tf32(_tf32(case)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in ("second",) if three_orders else order:
            jobs: dict[str, Job] = {}
            for name, call in calls.items():
                with warnings.catch_warnings(record=True) as heard:
                    warnings.simplefilter("always")
                    try:
                        jobs[name] = getattr(problem, kind.replace(" ", "_"))(call)
                    except Exception as error:
                        failures.setdefault(name, {})[kind] = reason(error, [str(h.message) for h in heard])
            for name, result in interleave(jobs, clock, milliseconds, warmup=2 if clock.cuda else 1).items():
                if isinstance(result, Exception):
                    failures.setdefault(name, {})["all" if kind == "second" else kind] = reason(result)
                else:
                    timings[name] |= result
            for name in jobs:
                if name not in failures:
                    job = problem.step(calls[name]) if kind == "backward" else jobs[name]
                    memory[name][kind] = peak_bytes(job, clock.device)
            del jobs
    rows = chosen(case, given, order, backend) if "adatom" in calls else {}
    entries = []
    for name in binds:
        about: dict[str, Any] = {"group": group, "case": case.name, "contender": name}
        for kind, why in failures.get(name, {}).items():
            entries.append({**about, "pass": kind, "reason": why})
        for kind in order:
            if name not in timings or kind not in timings[name]:
                continue
            timing = timings[name][kind]
            entry = {**about, "pass": kind, **({"row": rows[kind].backend} if name == "adatom" else {})}
            entry |= {"ms": timing.ms, "spread": [timing.low, timing.high], "repeats": timing.repeats}
            entry |= speed(case, kind, timing.ms, peaks)
            entries.append({**entry, "peak_bytes": memory[name].get("second" if three_orders else kind)})
    return entries


def _same(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Raise Unfit for the results of a rival that are not adatom's."""
    if len(found) != len(expected):
        raise Unfit(f"it returns {len(found)} tensors, adatom {len(expected)}")
    apart = max(map(_distance, found, expected))
    if not apart <= tolerance:
        raise Unfit(f"its result differs from adatom's by {apart:.1e}")


def _distance(a: Tensor, b: Tensor) -> float:
    """Relative distance, in the Euclidean norm; NaN if either holds one."""
    a, b = a.float(), b.float()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def _sample(x: Tensor) -> Tensor:
    """About 2**26 elements of x at most, evenly spread and copied: the gradients of many experts
    do not fit the memory twice."""
    return x.reshape(-1)[:: x.numel() >> 26 | 1].clone()


def speed(case: Any, kind: str, ms: float, peaks: dict[str, float]) -> dict[str, Any]:
    """Rates of a pass, what bounds it ("flops" or "bytes"), and the share of that ceiling which it reaches."""
    cases, op = registry.part(case.op, "cases"), op_pass(case, kind)
    flops, moved = cases.flops(case, op), cases.bytes_moved(case, op)
    if case.dtype in (torch.float16, torch.bfloat16) and "bf16 matmul" in peaks:
        product = peaks["bf16 matmul"]
    elif getattr(case, "precision", None) != "ieee" and "TF32 matmul" in peaks:
        product = peaks["TF32 matmul"]
    else:
        product = peaks["fp32 matmul"]
    by_flops, by_bytes = flops / product / 1e9, moved / peaks["copy"] / 1e6  # the least milliseconds that each allows
    return {
        "tflops": flops / ms / 1e9,
        "gbps": moved / ms / 1e6,
        "bound": "bytes" if by_bytes > by_flops else "flops",
        "share": max(by_flops, by_bytes) / ms,
    }


def host(device: torch.device, backend: str | None = None) -> tuple[str, list[dict[str, Any]]]:
    """Host microseconds per call of a small problem, beside SDPA's, without and with gradients: (problem, entries)."""
    cuda = device.type == "cuda"
    shape, dtype = ((1, 8, 128, 64), torch.bfloat16) if cuda else ((1, 1, 8, 8), torch.float32)
    b, h, s, d = shape
    given = {name: torch.randn(shape, dtype=dtype, device=device) for name in ("q", "k", "v")}
    contenders: dict[str, Callable[..., Any]] = {
        "adatom": partial(attention, backend=backend),
        "sdpa": scaled_dot_product_attention,
    }
    kinds = {"without_grad": False, "with_grad": True}
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    for name, call in contenders.items():
        for kind, grad in kinds.items():
            made = partial(call, *(given[x].detach().requires_grad_(grad) for x in ("q", "k", "v")))
            try:
                made()
                calls[name, kind] = made
            except (NotImplementedError, ValueError):  # the backend that was asked for does not run here
                pass
    taken = host_microseconds(calls, device)
    entries = [{"contender": name, **{kind: taken.get((name, kind)) for kind in kinds}} for name in contenders]
    return f"attention {shape} {str(dtype).removeprefix('torch.')}", entries


def device_name(device: torch.device) -> str:
    """What a reader would call this device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {torch.get_num_threads()} threads"


def start(device: torch.device, steady: bool = False) -> tuple[dict[str, Any], Clock]:
    """An empty record for this machine with its ceilings, and the clock to fill it with."""
    clock = Clock(device, steady)
    versions = {**machine.versions(), **{r.name: installed(r)[0] for r in every() if r.packages}}
    return {
        "device": device_name(device),
        "kind": device.type,
        "system": machine.system(),
        "versions": versions,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        **({"steady": True} if steady else {}),
        "ceilings": ceilings(clock),
        "host_case": "",
        "host": [],
        "entries": [],
    }, clock


def wanted(case: Any, group: str, rivals: tuple[str, ...], by_name: bool) -> dict[str, Bind]:
    """The rivals to time on a case: those installed that matter there, or all that were asked for by name, adatom's own
    backends among them."""
    mine = [rival for rival in contest(case.op).RIVALS if rival.name in rivals and installed(rival)[0]]
    own = {name: partial(ours, backend=name.removeprefix(OWN)) for name in rivals if name.startswith(OWN)}
    return {r.name: r.bind for r in mine if by_name or r.matters(case, group)} | own


def refusing(why: str) -> Bind:
    """Of a contender that may show no speed."""

    def bind(case: Any, given: dict[str, Any]) -> Call:
        raise Unfit(why)

    return bind


def _there(record: dict[str, Any]) -> dict[str, str]:
    """The versions of what is installed."""
    return {what: version for what, version in record["versions"].items() if version is not None}


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """A new record with the cases of an old one that it did not run, which keep their commit. A rival that is there in
    one of them only keeps its version.

    ValueError if the old one is of another device, other versions, or timed the other way (`--steady`).
    """
    if old.get("steady") != new.get("steady"):
        how = "without pauses" if old.get("steady") else "with pauses"
        raise ValueError(f"the record to be kept was timed {how}, this one is not; name another file")
    before, now = _there(old), _there(new)
    for what, same in (
        ("device", old["device"] == new["device"]),
        ("kind", old["kind"] == new["kind"]),
        ("versions", {**before, **now} == {**now, **before}),
    ):
        if not same:
            raise ValueError(f"the record to be kept is of {what} {old[what]}, this is {new[what]}; name another file")
    ran = {(e["group"], e["case"]) for e in new["entries"]}
    kept = [{"commit": old["commit"]} | e for e in old["entries"] if (e["group"], e["case"]) not in ran]
    known = {**_known(new["kind"], ("science",)), **_known(new["kind"])}
    place = {name: i for i, name in enumerate((group, case.name) for group in known for case in known[group])}
    every = sorted(kept + new["entries"], key=lambda e: place.get((e["group"], e["case"]), len(place)))
    kept_host = {} if new["host"] else {"host": old["host"], "host_case": _of_commit(old)}
    slowed = {group: why for group, why in old.get("slowed", {}).items() if any(e["group"] == group for e in kept)}
    slowed |= new.get("slowed", {})
    versions = {**new["versions"], **before, **now}
    return {**new, **kept_host, "versions": versions, **({"slowed": slowed} if slowed else {}), "entries": every}


def _of_commit(old: dict[str, Any]) -> str:
    """What the host's times of a record are of, with its commit."""
    case: str = old["host_case"]
    return case if not case or "commit" in case else f"{case}, commit {old['commit']}"


def _known(kind: str, ops: Sequence[str] = tuple(registry.PASSES)) -> dict[str, tuple[Any, ...]]:
    """The bench cases of these ops for "cpu" or "cuda", by group; of "science", those of its groups."""
    found: dict[str, tuple[Any, ...]] = {}
    if tuple(ops) == ("science",):
        found = science.groups(kind) | _known(kind, ("attention",))
        return {name: found[name] for name in science.GROUPS if name in found}
    for op in ops:
        cases = registry.part(op, "cases")
        found |= cases.BENCH_CPU if kind == "cpu" else cases.BENCH
    return found


def groups(
    device: torch.device, names: list[str], quick: bool, op: str | None = None, words: Sequence[str] = ()
) -> dict[str, tuple[Any, ...]]:
    """The bench cases of a device, those of one op or of all, by group; quick: the first of each; words: those alone
    whose name one of these is, or else is part of. Raises ValueError for an unknown group, and if no case is left."""
    known = _known(device.type, tuple(registry.PASSES) if op is None else (op,))
    unknown = [n for n in names if n not in known]
    if unknown:
        raise ValueError(f"no group {', '.join(unknown)}; there are: {', '.join(known)}")
    cases = {n: known[n] for n in names or known}
    whole = {case.name for some in cases.values() for case in some}

    def meant(name: str) -> bool:
        return not words or any(w == name or w not in whole and w in name for w in words)

    found = {n: tuple(case for case in some if meant(case.name)) for n, some in cases.items()}
    if words and not any(found.values()):
        listed = ", ".join(dict.fromkeys(case.name for some in cases.values() for case in some))
        raise ValueError(f"no case with {' or '.join(words)}; there are: {listed}")
    return {n: some[:1] if quick else some for n, some in found.items() if some or not words}


@cache
def _recorded(row: Row, arch: int) -> bool:
    """Whether the evidence has this row's present code as right on this architecture."""
    if not evidence.on_gpu(row.target):
        return False
    here = {
        name: proofs
        for name, proofs in evidence.read().items()
        if json.loads((evidence.DIRECTORY / name).read_text()).get("arch") == f"sm_{arch}"
    }
    return bool(evidence.proven(row.op, row.backend, row.target, here))


def unproven(problem: Problem, group: str, backend: str | None = None) -> str | None:
    """Why adatom's kernels may show no speed on a problem; None if they may.

    Each row that runs must have passed `verify` on this architecture with the code it has now, or pass it here on a
    small version of the case; and where it is a GPU kernel, agree at full size with the PyTorch path, derivatives
    included.
    """
    case, given = problem.case, problem.given
    device, order = problem.plain[0].device, passes(group, case)
    try:
        rows = chosen(case, given, order, backend)
        for name, row in rows.items():
            if _recorded(row, facts(device).arch):
                continue
            if not (passed := verify.passes(case, row, str(device))):
                why = "is in no evidence, and takes no small case" if passed is None else "fails `adatom verify`"
                return f"the {name} of {row.backend} {why}"
        if any(evidence.on_gpu(row.target) for row in rows.values()):
            try:
                plain = problem.results(ours(case, given, _PLAIN.get(case.op, "reference")), order)
                truth = {name: _sample(value) for name, value in plain.items()}
                del plain
            except torch.cuda.OutOfMemoryError:  # it needs more memory than the kernels do
                return None
            for name, value in problem.results(ours(case, given, backend), order).items():
                apart = _distance(_sample(value), truth[name])
                if not apart <= _tolerance(case):
                    return f"{name} differs from the PyTorch path's by {apart:.1e} at full size"
    except Exception as error:
        return reason(error)
    return None
