"""The clock of `adatom bench`: medians, turns, memory, ceilings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from adatom.bench import report, timing

CPU = torch.device("cpu")


def product(n: int) -> timing.Job:
    a = torch.randn(n, n)

    def job() -> Iterator[str]:
        a @ a
        yield "matmul"

    return job


def test_quantiles_interpolate() -> None:
    assert timing.quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert timing.quantile([0.0, 10.0], 0.2) == 2.0
    assert timing.quantile([7.0], 0.8) == 7.0


def test_more_work_takes_longer_and_spread_encloses_the_median() -> None:
    timed = timing.interleave({"small": product(64), "large": product(1024)}, timing.Clock(CPU), milliseconds=30)
    small, large = timed["small"], timed["large"]
    assert isinstance(small, dict) and isinstance(large, dict)
    assert large["matmul"].low > 2 * small["matmul"].low  # 4096 times the work, on a machine that may be busy
    for t in (small["matmul"], large["matmul"]):
        assert 0 < t.low <= t.ms <= t.high and t.repeats >= 3


def test_contenders_take_turns() -> None:
    order: list[str] = []

    def job(name: str) -> timing.Job:
        def step() -> Iterator[str]:
            order.append(name)
            yield "step"

        return step

    timing.interleave({name: job(name) for name in "abc"}, timing.Clock(CPU), milliseconds=1e4, most=40, warmup=1)
    assert order[:3] == list("abc")  # to warm up
    rounds = ["".join(order[i : i + 3]) for i in range(3, len(order), 3)]
    assert len(rounds) == 40 and {"".join(sorted(r)) for r in rounds} == {"abc"}
    assert len(set(rounds)) == 6  # nobody always comes after the same one


class Ticks(timing.Clock):
    """A steady clock that shows what `now` says, which jobs move on."""

    def __init__(self) -> None:
        super().__init__(CPU, steady=True)
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def between(self, start: float, end: float) -> float:
        return end - start

    def flush(self) -> None:
        pytest.fail("a pause")


def test_a_steady_clock_times_the_second_half_of_each_row() -> None:
    clock = Ticks()
    calls: list[str] = []

    def job(name: str, ms: float, first: float = 0.0) -> timing.Job:
        def step() -> Iterator[str]:
            clock.now += ms + first * (name not in calls)
            calls.append(name)
            yield "one"
            clock.now += len(calls)  # tells which calls were timed
            yield "two"
            clock.now -= len(calls)

        return step

    jobs = {"quick": job("quick", 1.0, first=500.0), "slow": job("slow", 100.0), "endless": job("endless", 400.0)}
    timed = timing.interleave(jobs, clock, warmup=1)
    for name, repeats in (("quick", 7 * 150), ("slow", 7 * 2), ("endless", 3)):
        result = timed[name]
        assert isinstance(result, dict) and result["one"].repeats == result["two"].repeats == repeats, name
    assert timed["quick"]["one"].high == 1.0  # type: ignore[index]
    clock.now, calls[:] = 0.0, []
    marks = clock.turn(job("quick", 1.0), 6)
    assert [round(clock.between(*m["two"])) for m in marks] == [4, 5, 6]
    briefly = timing.interleave({"quick": job("quick", 1.0)}, clock, milliseconds=20, warmup=1)["quick"]
    assert isinstance(briefly, dict) and briefly["one"].repeats == 3 * 150


def test_a_steady_job_may_fail_in_the_middle_of_a_turn() -> None:
    clock, calls = Ticks(), 0

    def job(last: int) -> timing.Job:
        def step() -> Iterator[str]:
            nonlocal calls
            calls += 1
            if calls > last:
                raise ValueError("broke")
            clock.now += 10.0
            yield "step"

        return step

    timed = timing.interleave({"breaks": job(50), "works": job(10**6)}, clock)
    assert isinstance(timed["breaks"], ValueError)
    assert isinstance(timed["works"], dict) and timed["works"]["step"].ms == 10.0


def test_a_failing_job_is_reported_and_the_others_go_on() -> None:
    calls = 0

    def fails_late() -> Iterator[str]:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise ValueError("broke")
        yield "step"

    def fails() -> Iterator[str]:
        raise MemoryError("at once")
        yield "step"

    timed = timing.interleave({"bad": fails, "late": fails_late, "good": product(8)}, timing.Clock(CPU))
    assert isinstance(timed["bad"], MemoryError) and isinstance(timed["late"], ValueError)
    assert isinstance(timed["good"], dict)


def test_phases_of_one_step_are_timed_apart() -> None:
    def job() -> Iterator[str]:
        product(8)().__next__()
        yield "short"
        for _ in range(20):
            next(product(256)())
        yield "long"

    timed = timing.interleave({"job": job}, timing.Clock(CPU), milliseconds=1)["job"]
    assert isinstance(timed, dict) and list(timed) == ["short", "long"]
    assert timed["long"].ms > timed["short"].ms


def test_peak_memory_counts_what_lives_at_the_same_time() -> None:
    def job(keep: bool) -> timing.Job:
        def step() -> Iterator[str]:
            held = []
            for _ in range(3):
                held.append(torch.zeros(1000, 250))  # 1 MB
                if not keep:
                    held.clear()
            yield "step"

        return step

    assert timing.peak_bytes(job(keep=True), CPU) == 3_000_000
    assert timing.peak_bytes(job(keep=False), CPU) == 1_000_000


def test_ceilings_of_a_cpu_are_plausible() -> None:
    found = timing.ceilings(timing.Clock(CPU))
    assert set(found) == {"fp32 matmul", "copy"}
    assert 1e-4 < found["fp32 matmul"] < 100 and 0.05 < found["copy"] < 5000


def test_a_throttled_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = timing.Clock(CPU)
    assert not timing.slowed(clock, {"bf16 matmul": 700.0})  # a CPU shares its time with others: nothing is said
    monkeypatch.setattr(clock, "cuda", True)
    for now, says in ((600.0, ""), (150.0, "bf16 matmul fell from 700 to 150 TFLOP/s")):
        monkeypatch.setattr(timing, "_product", lambda clock, dtype, now=now: now)
        assert timing.slowed(clock, {"bf16 matmul": 700.0}) == says
    record = {
        "device": "a GPU",
        "kind": "cuda",
        "versions": {},
        "date": "",
        "commit": "",
        "ceilings": {},
        "entries": [],
    }
    assert "Throttled, so without meaning: plain (slow)." in report.heading({**record, "slowed": {"plain": "slow"}})
