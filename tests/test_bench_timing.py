"""The clock of `adatom bench`: medians, turns, memory, ceilings."""

from __future__ import annotations

import itertools
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


def test_a_steady_clock_times_the_second_half_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_TURN", 20.0)
    monkeypatch.setattr(timing.Clock, "flush", lambda clock: pytest.fail("a pause"))
    order: list[str] = []

    def job(name: str) -> timing.Job:
        work = product(64)

        def step() -> Iterator[str]:
            order.append(name)
            return work()

        return step

    timed = timing.interleave({name: job(name) for name in "ab"}, timing.Clock(CPU, steady=True), warmup=1)
    rows = ["".join(row) for _, row in itertools.groupby(order[2:])]
    for name, result in timed.items():
        assert isinstance(result, dict)
        mine = sum(len(row) for row in rows if row[0] == name)
        assert mine >= 7 * 2 and mine / 2 <= result["matmul"].repeats <= mine / 2 + 7
        assert 0 < result["matmul"].low <= result["matmul"].ms <= result["matmul"].high
    assert len(rows) <= 7 * 2 < len(order)  # turns in a row, not steps in turn


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
