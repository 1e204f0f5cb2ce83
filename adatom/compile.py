"""Compile every kernel for any architecture, without a GPU, and report what the compiler made of it.

Launchers run on CPU tensors while `device.pretend` names the architecture and `tiles.launch.observed` takes each launch
instead of running it. Triton then compiles for that architecture, and the machine code is read: registers, spills,
shared memory, tensor-core and TMA instructions.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from adatom import device, evidence, registry
from adatom.device import Device
from adatom.tiles.launch import observed

# Multiprocessors and usable bytes of shared memory of one device of each architecture (CUDA programming guide).
DEVICES = {
    80: Device("cuda", 80, 108, 166912),
    86: Device("cuda", 86, 84, 101376),
    89: Device("cuda", 89, 128, 101376),
    90: Device("cuda", 90, 132, 232448),
    100: Device("cuda", 100, 148, 232448),
    120: Device("cuda", 120, 170, 101376),
}
QUICK_ARCHS = (80, 86, 90, 100)


class Spec(NamedTuple):
    """One specialisation to compile: a kernel, the arguments its launcher gave it, and where it was met first."""

    arch: int
    op: str
    backend: str
    case: str
    kernel: Any
    args: tuple[Any, ...]
    meta: dict[str, Any]
    spill: int


class Report(NamedTuple):
    """What became of one specialisation.

    registers: per thread. spill: bytes of register spill stores; spill_allowed: what its configuration allows. shared:
    bytes of shared memory. tensor_cores: tensor-core instructions by kind. tma_loads, tma_stores: bulk tensor copies.
    local_loads, local_stores: instructions that touch thread-local memory. traps: those that stop the kernel. waits:
    for products of warpgroups. overlap: the fewest exponentials between a wait that leaves a product under way and one
    that leaves none right after it; None without such waits. seconds: time to compile, near 0 if Triton's cache had it.
    failure: None, or why this specialisation fails.
    """

    arch: str
    op: str
    backend: str
    kernel: str
    case: str
    meta: dict[str, Any]
    registers: int = 0
    spill: int = 0
    spill_allowed: int = 0
    shared: int = 0
    shared_limit: int = 0
    tensor_cores: dict[str, int] = {}
    tma_loads: int = 0
    tma_stores: int = 0
    local_loads: int = 0
    local_stores: int = 0
    traps: int = 0
    waits: int = 0
    overlap: int | None = None
    seconds: float = 0.0
    failure: str | None = None


# -- without a GPU ----------------------------------------------------------------------------------------------------


class _Offline:
    """What Triton's compiler asks of a driver, answered for an architecture that need not be here."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return -self.arch  # Triton keeps compiled kernels by device; these must not meet those of a real one

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def offline(arch: int) -> Iterator[None]:
    """While active, Triton compiles for `arch` (90 for sm_90) and can launch nothing."""
    from triton.runtime import driver

    before = driver._active  # None until a driver was needed; asking for it without a GPU would raise
    driver.set_active(_Offline(arch))
    try:
        yield
    finally:
        driver.set_active(before)


def _name(kernel: Any) -> str:
    """Of a kernel: "triton_fwd._fwd_kernel"."""
    return f"{kernel.fn.__module__.split('.')[-1]}.{kernel.fn.__name__}"


def kernel_rows() -> list[registry.Row]:
    """The rows whose launcher is in a kernel file."""
    return [row for row in registry.ROWS if evidence.on_gpu(row.target)]


class Collector:
    """Takes launches instead of running them; `specs` are the different specialisations among them.

    wanted: takes "sm_90 attention_fwd triton triton_fwd._fwd_kernel bf16 64 full", says whether to keep such a launch.
    """

    def __init__(self, wanted: Callable[[str], bool] = bool) -> None:
        self.wanted = wanted
        self.specs: dict[Any, Spec] = {}
        self._keys: list[Any] = []

    def _remember(self, key: Any, **_: Any) -> bool:
        self._keys.append(key)
        return True  # do not compile

    def take(self, arch: int, op: str, backend: str, case: str, run: Callable[[], object]) -> None:
        """Collect what `run` launches on `arch`."""
        import triton

        def observer(kernel: Any, args: tuple[Any, ...], meta: dict[str, Any], spill: int) -> None:
            name = _name(kernel)
            if not self.wanted(f"sm_{arch} {op} {backend} {name} {case}"):
                return
            self._keys.clear()
            compiled = kernel.warmup(*args, grid=(1,), **meta)  # None, unless this process compiled it before
            key = arch, name, self._keys[0] if self._keys else compiled.hash
            if key not in self.specs:
                light = tuple(_weightless(a) for a in args)
                self.specs[key] = Spec(arch, op, backend, case, kernel, light, meta, spill)

        hook = triton.knobs.runtime.jit_cache_hook
        triton.knobs.runtime.jit_cache_hook = self._remember  # called before anything is compiled
        try:
            with device.pretend(DEVICES[arch]), offline(arch), observed(observer):
                run()
        finally:
            triton.knobs.runtime.jit_cache_hook = hook


def selection(quick: bool) -> list[Any]:
    """The cases of every op that together reach its kernels; quick: a thin selection for CI."""
    return [case for op in registry.PASSES for case in registry.part(op, "trial").selection(quick)]


def collect(archs: list[int], chosen: Iterable[Any], wanted: Callable[[str], bool] = bool) -> list[Spec]:
    """Every different specialisation that the kernel rows launch for these cases on these architectures."""
    collector = Collector(wanted)
    for case in chosen:
        pose, arguments = registry.part(case.op, "trial").blank(case)
        mine = [row for row in kernel_rows() if row.op in registry.PASSES[case.op]]
        for arch in archs:
            with device.pretend(DEVICES[arch]):
                posed = pose()
                fit = [row for row in mine if row.unfit(posed) is None]
            for row in fit:
                run = partial(registry.load(row.target), *arguments[row.op])
                collector.take(arch, row.op, row.backend, case.name, run)
    return list(collector.specs.values())


def _weightless(arg: Any) -> Any:
    """The argument without its memory: of a tensor, Triton looks at dtype and alignment only."""
    if isinstance(arg, torch.Tensor):
        return arg.to("meta")
    if isinstance(getattr(arg, "base", None), torch.Tensor):  # a tensor descriptor
        arg.base = arg.base.to("meta")
    return arg


# -- reading machine code ---------------------------------------------------------------------------------------------

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
# what lies between a wait for all products of a warpgroup but the last ones, and the wait for those
_OVERLAP = re.compile(
    r"WARPGROUP\.DEPBAR\.LE gsb0, 0x[1-9a-f]((?:(?!WARPGROUP\.DEPBAR).)*)WARPGROUP\.DEPBAR\.LE gsb0, 0x0", re.DOTALL
)
_TENSOR_CORE = re.compile(r"(HGMMA|QGMMA|IGMMA|HMMA|QMMA|IMMA|DMMA|UTC\w*MMA)")


def _run(tool: str, *args: str) -> str:
    """Run one of the CUDA tools that come with Triton."""
    import triton

    path = getattr(triton.knobs.nvidia, tool).path
    return subprocess.run([path, *args], capture_output=True, text=True, check=True).stdout


def read_cubin(cubin: bytes) -> dict[str, Any]:
    """Registers, spills and instruction counts of a compiled kernel, by the names of Report's fields."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run("cuobjdump", "-res-usage", file.name)
        text = _run("nvdisasm", "-c", file.name)
    counts = Counter(_INSTRUCTION.findall(text))

    def count(prefix: str) -> int:
        return sum(n for name, n in counts.items() if name.startswith(prefix))

    kinds: Counter[str] = Counter()
    spill = 0
    for name, n in counts.items():
        if match := _TENSOR_CORE.match(name):
            kinds[match.group(1)] += n
        if name.split(".")[0] == "STL":  # STL.128 stores 16 bytes
            bits = re.search(r"\.(8|16|64|128)\b", name)
            spill += n * (int(bits.group(1)) // 8 if bits else 4)
    registers = re.search(r"REG:(\d+)", usage)
    return {
        "registers": int(registers.group(1)) if registers else 0,
        "spill": spill,
        "tensor_cores": dict(kinds),
        "tma_loads": count("UTMALDG"),
        "tma_stores": count("UTMASTG") + count("UTMAREDG"),
        "local_loads": count("LDL"),
        "local_stores": count("STL"),
        "traps": count("BPT.TRAP"),
        "waits": count("WARPGROUP.DEPBAR"),
        "overlap": min((between.count("MUFU.EX2") for between in _OVERLAP.findall(text)), default=None),
    }


def _reason(error: BaseException) -> str:
    """One line. Triton shows the line of the kernel, ending in a caret; what is wrong with it is the cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")] or [""]
    return f"{type(error).__name__}: {lines[-1]}"


def _untuned() -> bool:
    """Whether this Triton has no configurations of its own yet. From 3.9 on Gluon's descriptors of products cost more
    registers."""
    return _triton() >= (3, 9)


def _triton() -> tuple[int, ...]:
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2]))


def _moves_wait(meta: dict[str, Any]) -> bool:
    """Whether this Triton is known to have ptxas move the wait of a consumer of such a forward: from 3.7 on under a
    mask at head_dim 128, at no cost that was seen (docs/tuning.md), from 3.9 on of packed sequences."""
    masked = meta.get("MASK", False) and meta.get("HEAD_DIM", 0) > 64
    return masked and _triton() >= (3, 7) or meta.get("VARLEN", False) and _triton() >= (3, 9)


def _spill_allowed(spec: Spec) -> int:
    """A kernel was tuned on an H100 under one Triton: another may spill a quarter more, and 512 bytes where nothing was
    tuned; another architecture may spill one register more."""
    return spec.spill * 5 // 4 + (512 if _untuned() and spec.kernel.is_gluon() else 0) + (4 if spec.arch != 90 else 0)


def build(spec: Spec) -> Report:
    """Compile one specialisation and read the result; a compiler's exception becomes the report's failure."""
    limit = DEVICES[spec.arch].shared_memory
    report = Report(
        f"sm_{spec.arch}",
        spec.op,
        spec.backend,
        _name(spec.kernel),
        spec.case,
        {k: v if isinstance(v, (int, float, str, bool)) else str(v) for k, v in spec.meta.items()},
        spill_allowed=_spill_allowed(spec),
        shared_limit=limit,
    )
    start = time.perf_counter()
    try:
        with offline(spec.arch):
            compiled = spec.kernel.warmup(*spec.args, grid=(1,), **spec.meta)
        seconds = time.perf_counter() - start
        found = read_cubin(compiled.asm["cubin"])
    except Exception as error:
        return report._replace(failure=_reason(error))
    report = report._replace(**found, shared=compiled.metadata.shared, seconds=round(seconds, 3))
    if report.traps and report.registers < 16:
        return report._replace(failure="is nothing but a trap: the compiler gave up, mostly for want of tensor memory")
    if report.shared > limit:
        return report._replace(failure=f"needs {report.shared} bytes of shared memory; sm_{spec.arch} has {limit}")
    if report.spill > report.spill_allowed:
        return report._replace(failure=f"spills {report.spill} bytes; its configuration allows {report.spill_allowed}")
    if spec.kernel.is_gluon():
        return report._replace(failure=_schedule(report) or _idle_barriers(compiled.asm["ttgir"]))
    return report


def _schedule(report: Report) -> str | None:
    """What the compiler did to the schedule of a Hopper kernel: it may move waits, or wait for each product."""
    products = report.tensor_cores.get("HGMMA", 0)
    if not products:  # those that only stream use no TMA
        return "does not multiply by warpgroups" if report.tma_loads else None
    if 2 * report.waits > products:
        return f"waits {report.waits} times for {products} products: they are serialised"
    walks = report.op == "attention_fwd" and report.backend != "hopper_tile"  # one tile has no block after it
    least = report.meta.get("BLOCK_N", 0) // (8 if report.meta.get("SQUARE") else 4)  # 8: of half a block
    if walks and (report.overlap or 0) < least and not _moves_wait(report.meta):
        return f"computes {report.overlap or 0} exponentials under its products: its softmax waits for them"
    return None


def _idle_barriers(ttgir: str) -> str | None:
    """Barriers that nobody looks at once they are made: Triton gives their memory to what is allocated behind them, and
    the hardware may yet write them back there, as when another process takes the GPU."""
    made = re.findall(r"(%[\w#]+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<\d+x1xi64,", ttgir)
    if not made and "init_barrier" in ttgir:
        return "makes barriers in a way that is not known"
    for name in made:
        parts = re.findall(rf"(%[\w#]+) = ttg\.memdesc_index {name}\[", ttgir)
        places = "|".join(map(re.escape, (name, *parts)))
        lines = re.findall(rf"^.*(?:{places})(?![\w#]).*$", ttgir, re.MULTILINE)
        if all(re.search(r"local_alloc|memdesc_index|init_barrier", line) for line in lines):
            return f"makes barriers that nobody looks at: {name}"
    return None


_specs: list[Spec] = []  # what worker processes inherit by fork: kernels and arguments do not travel in pickles


def _build_nth(n: int) -> Report:
    return build(_specs[n])


def build_all(specs: list[Spec], jobs: int, advance: Callable[[Report], None]) -> list[Report]:
    """Build every specialisation, in `jobs` processes; a compiler that dies takes only its own report down."""
    if jobs <= 1 or len(specs) <= 1:
        reports = []
        for spec in specs:
            reports.append(build(spec))
            advance(reports[-1])
        return reports
    global _specs
    _specs = specs
    done: dict[int, Report] = {}
    todo = list(range(len(specs)))
    workers = jobs
    while todo:
        with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
            try:
                held = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))  # what is forked here never sees one
                futures = {pool.submit(_build_nth, n): n for n in (todo if workers > 1 else todo[:1])}
                signal.pthread_sigmask(signal.SIG_SETMASK, held)
                for future in as_completed(futures):
                    n = futures[future]
                    try:
                        done[n] = future.result()
                    except BrokenProcessPool:
                        if workers > 1:
                            continue  # which one died is unknown: those left run again, one process each
                        done[n] = build_failed(specs[n])
                    advance(done[n])
            except KeyboardInterrupt:
                for worker in multiprocessing.active_children():  # for what they do the pool would wait
                    worker.terminate()
                raise
        if len(done) < len(specs):
            workers = 1
        todo = [n for n in todo if n not in done]
    return [done[n] for n in range(len(specs))]


def build_failed(spec: Spec) -> Report:
    """The report of a specialisation whose compiler process died."""
    kernel, meta = _name(spec.kernel), {k: str(v) for k, v in spec.meta.items()}
    return Report(f"sm_{spec.arch}", spec.op, spec.backend, kernel, spec.case, meta, failure="the compiler died")


# -- the command ------------------------------------------------------------------------------------------------------


def _tile(meta: dict[str, Any]) -> str:
    blocks = [f"{v}" for k, v in meta.items() if k in ("BLOCK_M", "BLOCK_N", "BLOCK_K")]
    return "x".join(blocks) or "-"


def table(reports: list[Report]) -> Table:
    """One line for each kernel, architecture, tile and kind of instruction: the worst of its specialisations."""
    out = Table(title="adatom compile")
    for name in ("arch", "kernel", "tile", "warps", "stages", "first case"):
        out.add_column(name)
    for name in ("specialisations", "registers", "spill B", "shared KB", "TMA", "tensor cores", "seconds"):
        out.add_column(name, justify="right")
    groups: dict[Any, list[Report]] = {}
    for r in reports:
        kinds = "+".join(sorted(r.tensor_cores)) or "-"
        key = (r.arch, r.kernel, _tile(r.meta), r.meta.get("num_warps"), r.meta.get("num_stages"), kinds)
        groups.setdefault(key, []).append(r)
    for (arch, kernel, tile, warps, stages, kinds), some in groups.items():
        out.add_row(
            arch,
            kernel,
            tile,
            str(warps),
            str(stages),
            some[0].case,
            str(len(some)),
            str(max(r.registers for r in some)),
            str(max(r.spill for r in some)),
            f"{max(r.shared for r in some) / 1024:.0f}",
            str(max(r.tma_loads + r.tma_stores for r in some)),
            kinds,
            f"{sum(r.seconds for r in some):.1f}",
            style="red" if any(r.failure for r in some) else None,
        )
    return out


def _archs(text: str | None, quick: bool, warm: bool) -> list[int]:
    if warm:
        if not torch.cuda.is_available():
            raise typer.BadParameter("--warm needs a CUDA device")
        facts = device.facts(torch.device("cuda"))
        DEVICES[facts.arch] = facts
        return [facts.arch]
    if text is None:
        return list(QUICK_ARCHS if quick else DEVICES)
    archs = []
    for name in text.split(","):
        number = name.strip().removeprefix("sm_")
        if not number.isdigit() or int(number) not in DEVICES:
            raise typer.BadParameter(f"{name!r}: there are {', '.join(f'sm_{a}' for a in DEVICES)}")
        archs.append(int(number))
    return archs


def command(
    arch: Annotated[str | None, typer.Option(help="Architectures, e.g. sm_80,sm_90. Default: all.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print every specialisation as JSON.")] = False,
    quick: Annotated[bool, typer.Option(help="A thin selection: four architectures, one case of each kind.")] = False,
    warm: Annotated[bool, typer.Option(help="Fill Triton's cache for this machine's GPU.")] = False,
    only: Annotated[str, typer.Option("-k", help="Only what has all these words: sm_90 _fwd_kernel causal")] = "",
    jobs: Annotated[int, typer.Option(help="Processes; 0: as many as there are CPUs.")] = 0,
) -> None:
    """Compile every kernel, no GPU needed: registers, spills, shared memory, tensor-core instructions.

    Exit 1 if one does not compile, spills more than its configuration allows, or needs more shared memory than
    there is; 2 if nothing can be compiled here.
    """
    console = Console(stderr=True)
    if device.interpreting():
        console.print("adatom compile: TRITON_INTERPRET is set, so Triton compiles nothing; unset it")
        raise typer.Exit(2)
    versions = device.versions()
    if versions["triton"] is None:
        console.print("adatom compile: needs Triton, which has Linux wheels: pip install 'triton>=3.6,<3.10'")
        raise typer.Exit(2)
    archs = _archs(arch, quick, warm)
    words = only.split()
    start = time.perf_counter()
    with Progress(console=console, transient=True) as progress:
        chosen = progress.track(selection(quick), description="launches")
        specs = collect(archs, chosen, lambda text: all(word in text for word in words))
    if not specs:
        console.print(f"adatom compile: nothing matches -k {only!r}")
        raise typer.Exit(2)
    jobs = jobs or os.cpu_count() or 1
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task(f"{len(specs)} specialisations", total=len(specs))
        reports = build_all(specs, jobs, lambda _: progress.advance(bar))
    failures = [r for r in reports if r.failure]
    if json_:
        listed = [r._asdict() for r in reports]
        sys.stdout.write(
            json.dumps({"versions": versions, "failures": len(failures), "kernels": listed}, indent=1) + "\n"
        )
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(table(reports))
    for r in failures:
        console.print(
            f"FAILED {r.arch} {r.kernel} {_tile(r.meta)} ({r.case}): {r.failure}",
            style="red",
            markup=False,
            soft_wrap=True,
        )
    console.print(
        f"{len(reports)} specialisations for {', '.join(f'sm_{a}' for a in archs)}, Triton {versions['triton']}, "
        f"{time.perf_counter() - start:.0f} s, {len(failures)} failed"
    )
    if failures:
        raise typer.Exit(1)
