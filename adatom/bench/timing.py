"""Times and memory of jobs, measured so that contenders can be compared: side by side, interleaved, caches flushed.

A job is a generator function: it does its work and yields the name of each phase as that phase ends, so one step can
have several timed phases (forward, backward, double backward) without running any of them twice.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

Job = Callable[[], Iterator[str]]
_SLEEP = 1_500_000  # clock cycles, about a millisecond
_TURN = 300.0  # milliseconds of a turn without pauses
_STEPS = 5000  # of a turn, at most


class Timing(NamedTuple):
    """Milliseconds of one phase: the median, and the 20th and 80th percentiles; `repeats` is how many were taken."""

    ms: float
    low: float
    high: float
    repeats: int


def quantile(values: list[float], share: float) -> float:
    """The value below which `share` of `values` lie, linearly interpolated. `values` must not be empty."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


class Clock:
    """Marks moments on a device's time line: CUDA events on a GPU, the host's clock on a CPU.

    `flush()` empties the L2 cache between measurements. It also keeps the GPU busy for a while, so that the host has
    launched the kernels of the job before the GPU gets to them and the launch itself stays out of the time.

    steady: jobs are to be timed without pauses and flushes, see `interleave`.
    """

    def __init__(self, device: torch.device, steady: bool = False):
        self.device, self.steady = device, steady
        self.cuda = device.type == "cuda"
        if self.cuda and not steady:
            total = torch.cuda.get_device_properties(device).total_memory
            self._cache = torch.empty(min(1 << 29, total // 32), dtype=torch.int8, device=device)

    def mark(self) -> Any:
        """This moment, as something that `between` takes."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def between(self, start: Any, end: Any) -> float:
        """Milliseconds from mark `start` to mark `end`; on a GPU only after `wait()`."""
        return start.elapsed_time(end) if self.cuda else 1e3 * (end - start)

    def flush(self) -> None:
        if self.cuda:
            self._cache.zero_()
            self._cache.view(torch.int64).sum()  # zeros still to be written back would share the memory with the job
            torch.cuda._sleep(_SLEEP)

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def step(self, job: Job) -> dict[str, tuple[Any, Any]]:
        """Run `job` once; the marks at the start and end of each of its phases."""
        marks = {}
        start = self.mark()
        for name in job():
            end = self.mark()
            marks[name] = (start, end)
            start = end
        return marks

    def turn(self, job: Job, steps: int) -> list[dict[str, tuple[Any, Any]]]:
        """The marks of a job's turn: of one step after a flush; of a steady clock, of the second half of `steps`."""
        if not self.steady:
            self.flush()
            return [self.step(job)]
        return [self.step(job) for _ in range(steps)][steps // 2 :]


def interleave(
    jobs: dict[str, Job], clock: Clock, milliseconds: float = 80.0, most: int = 50, warmup: int = 2
) -> dict[str, dict[str, Timing] | Exception]:
    """Time every job, taking turns, so that clock drift hits all alike, and in another order in each round: what went
    before leaves the GPU faster or slower, by 2 % of a kernel that memory bounds.

    Each job gets about `milliseconds` of measured time, between 3 and `most` repeats, spread evenly over the rounds.
    With a steady clock each gets 3 to 7 turns instead, about 300 ms of steps in a row (2 to 5000), whose second half is
    timed: what a long training sees, where a power limit sets the clocks, caches are as the last step left them, and
    the host must keep up. Returns, for each job, its phases' timings, or the exception that it raised.
    """
    results: dict[str, dict[str, Timing] | Exception] = {}
    repeats: dict[str, int] = {}
    steps: dict[str, int] = {}  # of a turn without pauses
    for name, job in jobs.items():
        try:
            for _ in range(warmup):
                marks = clock.step(job)
                clock.wait()
            if clock.steady:
                estimate = _in_a_row(job, clock)
                repeats[name] = 3 if milliseconds < 80 or estimate > _TURN else 7
            else:
                estimate = max(sum(clock.between(*m) for m in marks.values()), 1e-3)
                repeats[name] = max(3, min(most, int(milliseconds / estimate)))
            steps[name] = max(2, min(_STEPS, round(_TURN / estimate)))
        except Exception as error:  # a rival may fail in any way; the table shows how
            results[name] = _forget(error)
    rounds = max(repeats.values(), default=0)
    taken: dict[str, list[dict[str, tuple[Any, Any]]]] = {name: [] for name in repeats}
    times: dict[str, list[dict[str, float]]] = {name: [] for name in repeats}
    for i in range(rounds):
        for name in random.Random(i).sample(list(taken), len(taken)):
            if i * repeats[name] // rounds == (i + 1) * repeats[name] // rounds:
                continue
            try:
                taken[name] += clock.turn(jobs[name], steps[name])
                if clock.steady:  # thousands of marks; the next job has half a turn to get over this
                    times[name] += _read(taken[name], clock)
            except Exception as error:
                results[name] = _forget(error)
                del taken[name]
    for name, marked in taken.items():
        each = times[name] + _read(marked, clock)
        phases = {}
        for phase in each[0]:
            of = [step[phase] for step in each]
            phases[phase] = Timing(quantile(of, 0.5), quantile(of, 0.2), quantile(of, 0.8), len(of))
        results[name] = phases
    return {name: results[name] for name in jobs}


def _in_a_row(job: Job, clock: Clock) -> float:
    """Milliseconds of a step among others, by ever longer rows of them: a first call may take much longer."""
    count = 1
    while True:
        start = clock.mark()
        for _ in range(count):
            clock.step(job)
        end = clock.mark()
        clock.wait()
        took = clock.between(start, end)
        if took > _TURN / 10 or count >= _STEPS:
            return max(took / count, 1e-3)
        count *= 2


def _read(marked: list[dict[str, tuple[Any, Any]]], clock: Clock) -> list[dict[str, float]]:
    """The milliseconds between these marks, which are given up."""
    clock.wait()
    times = [{phase: clock.between(*marks) for phase, marks in step.items()} for step in marked]
    marked.clear()
    return times


def _forget(error: Exception) -> Exception:
    """`error` without its traceback, whose frames would keep the failed job's tensors alive."""
    error = error.with_traceback(None)
    error.__context__ = error.__cause__ = None
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return error


def peak_bytes(job: Job, device: torch.device) -> int:
    """The most memory that one run of `job` held beyond what was allocated before it, in bytes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        for _ in job():
            pass
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # the profiler writes its starts and stops to stderr
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        for _ in job():
            pass
    held = most = 0
    for event in profiler.kineto_results.events():  # in time order
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def host_microseconds(
    calls: dict[Any, Callable[[], Any]], device: torch.device, times: int = 100, rounds: int = 20
) -> dict[Any, float]:
    """Host microseconds of each of these calls, by name: the median over rounds in which they take turns.

    In its turn a call is made so many times, and none of them waits for the GPU. A processor that is shared is slow for
    a while, or as long as a process runs; turns let that hit all calls alike.
    """
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda *_: None
    taken: dict[Any, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):  # the first round warms up
        for name, call in calls.items():
            wait(device)
            start = time.perf_counter()
            for _ in range(times):
                call()
            elapsed = time.perf_counter() - start
            if i:
                taken[name].append(1e6 * elapsed / times)
    wait(device)
    return {name: quantile(each, 0.5) for name, each in taken.items()}


_PRODUCTS = (("bf16 matmul", torch.bfloat16), ("TF32 matmul", torch.float32), ("fp32 matmul", torch.float32))
_SLOW = 0.8


def _product(clock: Clock, dtype: torch.dtype, by_tf32: bool = False) -> float:
    """TFLOP/s of a large matrix product."""
    n = 8192 if clock.cuda else 1024
    a, b = (torch.randn(n, n, device=clock.device, dtype=dtype) for _ in range(2))

    def job() -> Iterator[str]:
        a @ b
        yield "matmul"

    with tf32(by_tf32):
        timed = interleave({"": job}, clock, milliseconds=100)[""]
    return 2 * n**3 / 1e9 / _ms(timed)


def slowed(clock: Clock, ceilings: dict[str, float]) -> str:
    """How far a GPU has fallen below its ceilings, in words; "" if it has not. Heat or a shared power budget does that,
    and no time taken then says anything about a kernel."""
    name, dtype = _PRODUCTS[0]
    if not clock.cuda or name not in ceilings:
        return ""
    now = _product(clock, dtype)
    return "" if now >= _SLOW * ceilings[name] else f"{name} fell from {ceilings[name]:.0f} to {now:.0f} TFLOP/s"


def ceilings(clock: Clock) -> dict[str, float]:
    """What this device reaches at best, or in the long run if the clock is steady: matrix products in TFLOP/s and a
    copy in GB/s (bytes read plus written)."""
    device = clock.device
    best = {name: _product(clock, dtype, name == "TF32 matmul") for name, dtype in _PRODUCTS[0 if clock.cuda else 2 :]}
    count = (1 << 30) if clock.cuda else (1 << 26)
    source = torch.randn(count // 4, device=device)
    target = torch.empty_like(source)

    def copy() -> Iterator[str]:
        target.copy_(source)
        yield "copy"

    best["copy"] = 2 * count / 1e6 / _ms(interleave({"copy": copy}, clock, milliseconds=100)["copy"])
    return best


def _ms(timed: dict[str, Timing] | Exception) -> float:
    if isinstance(timed, Exception):
        raise timed
    return sum(t.ms for t in timed.values())


class tf32:
    """While active, PyTorch's own float32 matrix products on a GPU may (or may not) use TF32."""

    def __init__(self, allowed: bool):
        self.allowed = allowed

    def __enter__(self) -> None:
        self.before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if self.allowed else "highest")

    def __exit__(self, *_: object) -> None:
        torch.set_float32_matmul_precision(self.before)
