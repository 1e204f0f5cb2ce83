"""`adatom compile`: real kernels and toys, compiled for sm_80 and sm_90 in processes that do not interpret Triton."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from adatom import compile as compiling
from adatom.cli import app
from adatom.ops.attention.trial import COMPILE, COMPILE_TILE, QUICK_CASES, QUICK_TILES
from adatom.registry import PASSES

ROOT = Path(__file__).parents[1]
TOYS = """
import json, sys, torch, triton
import triton.language as tl
from adatom import compile as compiling
from adatom.tiles.launch import launch

@triton.jit
def product(X, Y, Z, n, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    z = tl.zeros((SIZE, SIZE), tl.float32)
    for k in range(n):
        z = tl.dot(tl.load(X + i + k * SIZE * SIZE), tl.load(Y + i + k * SIZE * SIZE), z)
    tl.store(Z + i, z)

@triton.jit
def centre(X, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(X + i)
    tl.store(X + i, x - tl.sum(x, 0)[None, :] * tl.sum(x, 1)[:, None])

@triton.jit
def broken(X):
    tl.store(X + tl.arange(0, 3), 0)

def toys():
    x, z = torch.zeros(64, dtype=torch.float16), torch.zeros(64)
    for n in (5, 7):  # one specialisation: numbers are no constants
        launch(product, 1, (x, x, z, n), dict(SIZE=64, num_warps=4, num_stages=2))
    launch(product, 1, (x, x, z, 5), dict(SIZE=128, num_warps=8, num_stages=6))
    launch(centre, 1, (z,), dict(SIZE=128, num_warps=1, num_stages=1))
    launch(centre, 0, (z,), dict(SIZE=64, num_warps=4, num_stages=1), spill=64)
    launch(broken, 1, (z,), dict(num_warps=4, num_stages=1))

collector = compiling.Collector()
for arch in (80, 90):
    collector.take(arch, "toy_fwd", "triton", "case", toys)
reports = compiling.build_all(list(collector.specs.values()), 2, lambda report: None)
json.dump([r._asdict() for r in reports], sys.stdout)
"""


def run(*command):
    """stdout of a Python process in which Triton compiles; it may exit with 0 only."""
    pytest.importorskip("triton")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    script = tmp_path_factory.mktemp("toys") / "toys.py"
    script.write_text(TOYS)
    reports = json.loads(run(str(script)))
    return {(r["arch"], r["kernel"].split(".")[1], r["meta"].get("SIZE")): r for r in reports}


def test_specialisations_are_compiled_once(toys):
    assert len(toys) == 2 * 5


def test_tensor_cores_of_each_architecture(toys):
    for arch, kind in (("sm_80", "HMMA"), ("sm_90", "HGMMA")):
        report = toys[arch, "product", 64]
        assert set(report["tensor_cores"]) == {kind}
        assert report["failure"] is None
        assert report["registers"] > 16
        assert report["shared"] > 0
        assert report["seconds"] > 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_failures(toys, arch):
    spills = toys[arch, "centre", 128]
    assert spills["local_stores"] > 0
    register = 0 if arch == "sm_90" else 4  # one more where nothing was tuned
    assert spills["failure"] == f"spills {spills['spill']} bytes; its configuration allows {register}"
    calm = toys[arch, "centre", 64]
    assert (calm["spill"], calm["spill_allowed"], calm["failure"]) == (0, 80 + register, None)  # 64 and a quarter
    large = toys[arch, "product", 128]
    assert large["failure"].startswith(f"needs {large['shared']} bytes of shared memory; {arch} has")
    assert large["shared"] > large["shared_limit"] > 160_000
    assert "power of 2" in toys[arch, "broken", None]["failure"]


@pytest.fixture(scope="module")
def kernels():
    """Reports of what launchers of attention launch for one plain case."""
    words = ("--arch", "sm_80,sm_90", "--quick", "-k", "bf16 64 full", "--jobs", "2", "--json")
    return json.loads(run("-c", "from adatom.cli import app; app()", "compile", *words))["kernels"]


REACHED = """
import json
from adatom import compile as compiling, registry
specs = compiling.collect([90], compiling.selection(True))
targets = {(r.op, r.backend): r.target for r in compiling.kernel_rows()}
print(json.dumps(sorted({targets[s.op, s.backend] for s in specs})))
"""


def test_a_quick_selection_reaches_every_kernel():
    reached = json.loads(run("-c", REACHED).splitlines()[-1])
    assert set(reached) == {row.target for row in compiling.kernel_rows()}


_OTHERS = ("hopper_tile", "hopper_deep", "hopper_shared", "hopper_float")  # rows that do not take that case


def test_every_row_of_attention_is_compiled(kernels):
    mine = [r for r in compiling.kernel_rows() if r.op in PASSES["attention"]]
    targets = {(r.op, r.backend): r.target for r in mine}  # rows may share one
    for arch in ("sm_80", "sm_90"):
        backends = {b for _, b in targets if arch == "sm_90" and not b.startswith(_OTHERS) or "hopper" not in b}
        wanted = {t for (_, backend), t in targets.items() if backend in backends}
        assert {targets[r["op"], r["backend"]] for r in kernels if r["arch"] == arch} == wanted
    assert {r["arch"] for r in kernels} == {"sm_80", "sm_90"}


def test_kernels_use_the_hardware(kernels):
    for r in kernels:
        assert 16 < r["registers"] <= 255
        assert r["spill"] <= r["spill_allowed"]
        assert r["shared"] <= r["shared_limit"]
        if "BLOCK_N" in r["meta"]:  # all but the row sums
            assert set(r["tensor_cores"]) == {"HMMA" if r["arch"] == "sm_80" else "HGMMA"}, r["kernel"]
        if "hopper" not in r["kernel"]:
            assert (r["tma_loads"] > 0) == bool(r["meta"].get("TMA")), r["kernel"]
    forward = {r["arch"]: r for r in kernels if r["kernel"] == "triton_fwd._fwd_kernel"}
    assert forward["sm_90"]["spill"] == forward["sm_80"]["spill"] == 0
    assert {r["arch"] for r in kernels if r["tma_loads"]} == {"sm_90"}


def test_the_schedule_of_hopper_kernels(kernels):
    """Products in flight, exponentials under them, no spills."""
    for r in kernels:
        if r["kernel"] in ("hopper_fwd._fwd_kernel", "hopper_fwd_fast._fast_kernel", "hopper_bwd._bwd_kernel"):
            assert r["failure"] is None
            assert r["spill"] == 0 or r["kernel"] != "hopper_fwd._fwd_kernel"
            assert r["tma_loads"] and r["tma_stores"]
            assert r["tensor_cores"]["HGMMA"] > 2 * r["waits"]
            assert r["overlap"] >= 32 or r["op"] != "attention_fwd"


@pytest.mark.parametrize("use", ["", "ttng.wait_barrier %full_2, %phase", "ttg.warp_specialize(%q_s, %full)"])
def test_barriers_that_nobody_looks_at(use):
    """One that is made and used no more; `%full` begins the names of two others, of which one is used."""
    barrier = "!ttg.memdesc<2x1xi64, #shared4, #smem, mutable>"
    ttgir = f"""
    %full = ttg.local_alloc : () -> {barrier}
    %full_1 = ttg.memdesc_index %full[%c0_i32] : {barrier} -> !ttg.memdesc<1xi64, #shared4, #smem, mutable>
    ttng.init_barrier %full_1, 1 : !ttg.memdesc<1xi64, #shared4, #smem, mutable>
    %full_2 = ttg.memdesc_index %full[%c1_i32] : {barrier} -> !ttg.memdesc<1xi64, #shared4, #smem, mutable>
    ttng.init_barrier %full_2, 1 : !ttg.memdesc<1xi64, #shared4, #smem, mutable>
    %full_3 = ttg.local_alloc : () -> {barrier}
    ttg.warp_specialize(%q_s, %full_3)
    {use}
    """
    assert compiling._idle_barriers("") is None
    assert "not known" in (compiling._idle_barriers(ttgir.replace("local_alloc", "another")) or "")
    found = compiling._idle_barriers(ttgir)
    assert found is None if use else found == "makes barriers that nobody looks at: %full"


def test_a_forward_without_its_blocks_in_its_name_has_a_schedule_too():
    """As hopper_shared's, whose blocks are no constexprs: only its waits are held to its products."""
    report = compiling.Report("sm_90", "attention_fwd", "", "", "", {}, tensor_cores={"HGMMA": 16}, waits=8)
    assert compiling._schedule(report) is None
    assert "serialised" in (compiling._schedule(report._replace(waits=9)) or "")


def test_quick_names_cases():
    assert set(QUICK_CASES) <= {case.name for case in COMPILE}
    assert set(QUICK_TILES) <= {case.name for case in COMPILE_TILE}


def test_interpreter_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    result = CliRunner().invoke(app, ["compile", "--quick"])
    assert result.exit_code == 2
    assert "TRITON_INTERPRET is set" in result.output


def test_bad_requests(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    result = CliRunner().invoke(app, ["compile", "--arch", "sm_75"])
    assert result.exit_code == 2
    assert "sm_90" in result.output
    if not torch.cuda.is_available():
        assert CliRunner().invoke(app, ["compile", "--warm"]).exit_code == 2
