"""`adatom doctor`: what this machine has, whether adatom works on it, and which kernel runs for typical problems."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.markup import escape
from torch.nn.attention import SDPBackend

from adatom import __version__
from adatom.bench.rivals import every, installed
from adatom.device import Device, facts, pretend, versions
from adatom.ops.attention import cases, reference
from adatom.ops.attention.api import inputs_of, problem_of
from adatom.ops.attention.cases import BF16, F32, Case
from adatom.ops.attention.op import Attention
from adatom.registry import PASSES, verdicts
from adatom.verify import by_reason

ORDERS = {
    "attention_fwd": "forward",
    "attention_bwd": "backward",
    "attention_bwd_bwd": "double backward",
    "attention_jvp": "forward mode",
}
TYPICAL = (
    Case("LLM prefill, bf16, causal, D128, GQA", 2, 32, 8, 4096, 4096, 128, 128, BF16, causal=True),
    Case("learned bias with its gradient, bf16", 8, 16, 16, 768, 768, 32, 32, BF16, bias="1hqk"),
    Case("second derivatives, float32", 1, 16, 16, 4096, 4096, 64, 64, F32),
    Case("packed sequences, bf16, causal", 16, 16, 16, 4096, 4096, 128, 128, BF16, varlen=True, causal=True),
    Case("decoding, one query, bf16", 8, 32, 8, 1, 32768, 128, 128, BF16, causal=True, kv_lens=True),
)
SMOKE = Case("smoke", 2, 4, 2, 65, 97, 32, 32, F32, bias="1hqk", causal=True)


class Check(NamedTuple):
    """One thing looked at. state: "ok", "note" (works, but less than it could) or "broken"; cure: what to do then."""

    name: str
    state: str
    detail: str
    cure: str = ""


# The machine -------------------------------------------------------------------------------------------------------


def driver() -> str | None:
    """Version of the NVIDIA driver, or None if there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=20)
            if done.returncode == 0 and done.stdout.strip():
                return done.stdout.split()[0]
        except (OSError, subprocess.TimeoutExpired):
            pass
    try:
        found = re.search(r"Kernel Module\D*([\d.]+)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return None
    return found.group(1) if found else None


def nvidia_hardware() -> bool:
    """Whether an NVIDIA display or compute device is on the PCI bus, driver or not. Linux only; else False."""
    for path in Path("/sys/bus/pci/devices").glob("*"):
        try:
            vendor, kind = (path / "vendor").read_text().strip(), (path / "class").read_text().strip()
        except OSError:
            continue
        if vendor == "0x10de" and kind.startswith("0x03"):
            return True
    return False


def gpus() -> list[dict[str, Any]]:
    """Name, architecture, multiprocessors and memory of each GPU that torch sees."""
    found = []
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        this, properties = facts(torch.device("cuda", i)), torch.cuda.get_device_properties(i)
        found.append(
            {
                "index": i,
                "name": properties.name,
                "arch": f"sm_{this.arch}",
                "multiprocessors": this.sms,
                "shared_memory": this.shared_memory,
                "memory": properties.total_memory,
            }
        )
    return found


def backends(device: torch.device) -> dict[str, bool]:
    """The SDPA backends of this torch, and whether they are enabled on `device`."""
    if device.type != "cuda":
        return {"flash": True, "math": True}
    enabled = torch.backends.cuda
    return {
        "flash": enabled.flash_sdp_enabled() and torch.backends.cuda.is_flash_attention_available(),
        "cudnn": hasattr(SDPBackend, "CUDNN_ATTENTION") and enabled.cudnn_sdp_enabled(),
        "efficient": enabled.mem_efficient_sdp_enabled(),
        "math": enabled.math_sdp_enabled(),
    }


# What works --------------------------------------------------------------------------------------------------------


def within(version: str, wanted: str) -> bool:
    """Whether a version lies in a range such as ">=2.11,<3". Suffixes ("+cu130", "rc1") do not count."""

    def numbers(text: str) -> tuple[int, ...]:
        found = re.match(r"[\d.]+", text)
        return tuple(int(n) for n in found.group().strip(".").split(".")) if found else ()

    have = numbers(version)
    for sign, bound in re.findall(r"(>=|<=|==|!=|<|>)\s*([\w.]+)", wanted):
        limit = numbers(bound)
        a, b = (x + (0,) * (max(len(have), len(limit)) - len(x)) for x in (have, limit))
        if not {">=": a >= b, "<=": a <= b, "==": a == b, "!=": a != b, "<": a < b, ">": a > b}[sign]:
            return False
    return True


def required() -> dict[str, str]:
    """The version ranges that adatom's metadata gives for python, torch and triton; empty where it is not installed."""
    try:
        metadata = importlib.metadata.metadata("adatom")
    except importlib.metadata.PackageNotFoundError:
        return {}
    ranges = {"python": metadata["Requires-Python"] or ""}
    for line in metadata.get_all("Requires-Dist") or []:
        found = re.match(r"(torch|triton)\s*\(?([^;)\s]*)", line)
        if found:
            ranges[found.group(1)] = found.group(2)
    return ranges


def check_versions(have: dict[str, str | None], ranges: dict[str, str]) -> list[Check]:
    """Whether python, torch and Triton lie in the ranges that adatom supports."""
    checks = []
    for name, wanted in ranges.items():
        version = have.get(name)
        if version is None:
            continue
        good = within(version, wanted)
        cure = f"pip install '{name}{wanted}'" if name != "python" else f"use a Python {wanted}"
        detail = f"{version}; adatom needs {wanted}" if not good else f"{version} ({wanted})"
        checks.append(Check(f"{name} version", "ok" if good else "broken", detail, "" if good else cure))
    return checks


def check_cuda(
    cuda: str | None, available: bool, hardware: bool, driver_version: str | None, triton: str | None, error: str = ""
) -> list[Check]:
    """Whether torch, driver and Triton fit together. cuda: the CUDA version torch was built for, None for a CPU build.

    A CUDA build on a machine without an NVIDIA GPU is fine: it runs on the CPU.
    """
    present = hardware or driver_version is not None
    if cuda is None:
        if present:
            cure = "install a CUDA build of torch: https://pytorch.org/get-started/locally/"
            return [Check("GPU", "broken", "there is an NVIDIA GPU, but this torch is a CPU build", cure)]
        return [Check("GPU", "note", "none, and torch is a CPU build: adatom runs in PyTorch on the CPU")]
    if not available and driver_version is None and hardware:
        cure = "install NVIDIA's driver; in a container, start it with the GPU passed in (docker run --gpus all)"
        return [Check("GPU", "broken", f"torch is built for CUDA {cuda}, but there is no NVIDIA driver", cure)]
    if not available and present:
        cure = f"update NVIDIA's driver, or install a torch for an older CUDA than {cuda}; unset CUDA_VISIBLE_DEVICES"
        return [Check("GPU", "broken", f"driver {driver_version}, but torch cannot use the GPU: {error}", cure)]
    if not available:
        return [Check("GPU", "note", f"none: torch is built for CUDA {cuda}, and adatom runs in PyTorch on the CPU")]
    checks = [Check("GPU", "ok", f"CUDA {cuda}, driver {driver_version or 'unknown'}")]
    if triton is None:
        cure = "pip install triton (in the version that your torch names: pip show torch); it exists for Linux only"
        checks.append(Check("Triton", "broken", "not installed: no GPU kernel can run", cure))
    return checks


def check_arch(found: list[dict[str, Any]]) -> list[Check]:
    """Whether each GPU is new enough for adatom's kernels."""
    checks = []
    for gpu in found:
        if int(gpu["arch"].removeprefix("sm_")) < 80:
            detail = f"{gpu['name']} is {gpu['arch']}; the kernels need sm_80 (Ampere) or newer"
            cure = "use another GPU (CUDA_VISIBLE_DEVICES); on this one attention runs in plain PyTorch, slowly"
            checks.append(Check(f"cuda:{gpu['index']}", "broken", detail, cure))
    return checks


def smoke(device: torch.device) -> Check:
    """A small attention with a bias, forward and backward, against the float64 reference."""
    name = f"attention on {device}"
    try:
        given = cases.make(SMOKE, device)
        x, o, backend = inputs_of(**given)
        leaves = [t.requires_grad_() for t in x[:4]]  # type: ignore[union-attr]
        out, lse = Attention.apply(*x, *o, backend)
        dout = torch.ones_like(out)
        grads = torch.autograd.grad(out, leaves, dout)
        wide = x._replace(**{n: t.detach().double() for n, t in zip(x._fields, leaves)})
        true_out, true_lse = reference.forward(wide, o)
        wanted = reference.backward(wide, o, true_out, true_lse, dout.double(), None, True)
        pairs = [(out.detach(), true_out), *zip(grads, wanted[:4])]
        worst = max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        return Check(name, "broken", text, "run `adatom verify --quick`; if it fails too, report both outputs")
    if not worst < 1e-5:
        cure = "do not trust results on this machine; run `adatom verify` and report its table"
        return Check(name, "broken", f"differs from float64 by {worst:.1e} (float32 errs about 1e-7)", cure)
    return Check(name, "ok", f"forward and backward within {worst:.0e} of float64")


def typical(device: Device) -> list[dict[str, Any]]:
    """For each typical problem and pass, the kernel that runs on `device`, and why each faster one does not."""
    found = []
    with pretend(device):
        for case in TYPICAL:
            # a problem of the right kind from tiny tensors, then the sizes: nothing large is allocated
            given = cases.make(case._replace(batch=1, seqlen_q=1, seqlen_k=2), "cpu")
            given.pop("kv_lens", None)
            posed, _ = problem_of(**given)
            posed = posed._replace(
                batch=case.batch,
                seqlen_q=case.seqlen_q * (case.batch if case.varlen else 1),
                seqlen_k=case.seqlen_k * (case.batch if case.varlen else 1),
                kv_lens=case.kv_lens,
                bias=("full" if case.bias else "none"),
                bias_grad=bool(case.bias),
                bias_shared=bool(case.bias),
                least_length=min(case.seqlen_q, case.seqlen_k),
                tma=device.kind == "cuda",
                bias_tma=device.kind == "cuda",
            )
            for op in PASSES["attention"]:
                rows = verdicts(op, posed)
                runs = next((v.backend for v in rows if v.chosen), None)
                faster = []
                for verdict in rows:
                    if verdict.chosen:
                        break
                    faster.append({"backend": verdict.backend, "unfit": verdict.unfit})
                found.append({"problem": case.name, "pass": ORDERS[op], "runs": runs, "faster": faster})
    return found


def examine() -> dict[str, Any]:
    """Everything that doctor reports; "checks" holds the verdicts."""
    have = versions()
    error = ""
    if torch.version.cuda is not None and not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except Exception as caught:
            error = str(caught).strip().splitlines()[0]
    found, driver_version = gpus(), driver()
    devices = [torch.device("cuda", gpu["index"]) for gpu in found] + [torch.device("cpu")]
    checks = check_versions(have, required())
    checks += check_cuda(
        torch.version.cuda, torch.cuda.is_available(), nvidia_hardware(), driver_version, have["triton"], error
    )
    checks += check_arch(found) + [smoke(device) for device in devices]
    return {
        "adatom": __version__,
        "machine": {
            "system": platform.platform(),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "driver": driver_version,
        },
        "versions": have,
        "gpus": found,
        "rivals": {r.name: installed(r)[0] for r in every() if r.packages} | {"flex_attention": torch.__version__},
        "sdpa": backends(devices[0]),
        "device": str(devices[0]),
        "typical": typical(facts(devices[0])),
        "checks": [check._asdict() for check in checks],
    }


# Showing it --------------------------------------------------------------------------------------------------------


def summary(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The facts of a report as pairs of a name and a text."""
    machine = report["machine"]
    have = {"adatom": report["adatom"], **report["versions"]}
    lines = [
        ("machine", f"{machine['system']}, {machine['processor']}, {machine['cores']} cores"),
        ("driver", machine["driver"] or "no NVIDIA driver"),
        (
            "versions",
            ", ".join(f"{n} {v or 'absent'}" for n, v in have.items()),
        ),
    ]
    for gpu in report["gpus"]:
        shared, memory = gpu["shared_memory"] / 1024, gpu["memory"] / 2**30
        text = f"{gpu['name']}, {gpu['arch']}, {gpu['multiprocessors']} SMs"
        lines.append((f"cuda:{gpu['index']}", f"{text}, {shared:.0f} KiB shared memory each, {memory:.0f} GiB"))
    rivals = ", ".join(f"{name} {version}" if version else f"{name} -" for name, version in report["rivals"].items())
    sdpa = ", ".join(name if on else f"{name} (off)" for name, on in report["sdpa"].items())
    return [*lines, ("rivals", rivals), ("SDPA has", sdpa)]


def _kernels(report: dict[str, Any]) -> str:
    """Which kernel runs each typical problem, pass by pass, and below it why faster ones do not."""
    merged: dict[tuple[str, str, str], list[str]] = {}  # passes with the same answer share a line
    for row in report["typical"]:
        faster = "".join("\n      not " + line for line in by_reason((f["backend"], f["unfit"]) for f in row["faster"]))
        merged.setdefault((row["problem"], row["runs"], faster), []).append(row["pass"])
    lines, before = [f"[bold]which kernel runs on {report['device']}[/]"], None
    for (problem, runs, faster), orders in merged.items():
        if problem != before:
            lines.append(f"  {escape(problem)}")
        lines.append(f"    {', '.join(orders)}: [bold]{runs}[/][dim]{escape(faster)}[/]")
        before = problem
    return "\n".join(lines)


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Look at this machine: versions, GPUs, rivals, which kernels run, and whether they work."""
    console = Console()
    with nullcontext() if as_json else console.status("looking at this machine"):
        report = examine()
    broken = [check for check in report["checks"] if check["state"] == "broken"]
    if as_json:
        typer.echo(json.dumps(report, indent=1))
        raise typer.Exit(1 if broken else 0)
    for name, text in summary(report):
        console.print(f"[bold]{name:>9}[/]  {escape(text)}", highlight=False, soft_wrap=True)
    console.print(_kernels(report), highlight=False, soft_wrap=True)
    marks = {"ok": "[green]ok    [/]", "note": "[yellow]note  [/]", "broken": "[red]broken[/]"}
    for check in report["checks"]:
        console.print(
            f"{marks[check['state']]}  {check['name']}: {escape(check['detail'])}", highlight=False, soft_wrap=True
        )
        if check["cure"]:
            console.print(f"        cure: {escape(check['cure'])}", highlight=False, soft_wrap=True)
    if broken:
        raise typer.Exit(1)
