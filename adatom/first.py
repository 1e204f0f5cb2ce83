"""The first call of a configuration, when Triton has its kernels to make: what can be made side by side, is.

Triton makes one thing after the other while all processors but one are idle. Its front end holds Python's lock; LLVM,
ptxas, gcc and hashes do not. Whatever goes wrong here is left to Triton, which then does it in its own order.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from threading import Lock, Thread, get_ident
from types import SimpleNamespace
from typing import Any

import torch

from adatom.device import interpreting
from adatom.evidence import on_gpu

_collecting = Lock()


def _quietly(work: Callable[[], object]) -> Thread:
    """Start `work` in a thread. Its errors are dropped: who needs the result asks for it again, and meets them."""

    def run() -> None:
        try:
            work()
        except Exception:
            pass

    thread = Thread(target=run, daemon=True)
    thread.start()
    return thread


@cache
def _prepared() -> list[Thread]:
    """What Triton keeps for its first kernel: its module of C for the GPU's driver, and hashes of itself."""
    from triton.runtime import driver
    from triton.runtime.cache import triton_key

    def versions() -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler.compiler import make_backend

        make_backend(GPUTarget("cuda", 10 * major + minor, 32)).hash()

    major, minor = torch.cuda.get_device_capability()
    return [_quietly(lambda: driver.active), _quietly(triton_key), _quietly(versions)]


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Without Python's garbage collector: it would look at all that PyTorch has imported, again and again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def prepare(load: Callable[[], Any]) -> Any:
    """load(), which imports kernels, beside what they will need."""
    if not torch.cuda.is_initialized():
        return load()
    with _undisturbed():
        try:
            threads = _prepared()
        except Exception:
            threads = []
        try:
            return load()
        finally:
            for thread in threads:
                thread.join()


def _with_launcher(compiling: Callable[[], Any]) -> Callable[[], Any]:
    """`compiling`, with the C function that launches its kernel made beside it: Triton 3.6 has one for each kernel."""
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    src = inspect.getclosurevars(compiling).nonlocals.get("src")
    if src is None or not hasattr(nvidia, "make_launcher"):
        return compiling
    descriptors = [t for t in src.signature.values() if isinstance(t, str) and t.startswith("tensordesc")]
    expected = SimpleNamespace(
        tensordesc_meta=[{}] * len(descriptors),
        global_scratch_size=0,
        global_scratch_align=1,
        profile_scratch_size=0,
        profile_scratch_align=1,
        launch_cooperative_grid=False,
        launch_pdl=False,
    )

    def both() -> Any:
        launcher = _quietly(lambda: driver.active.launcher_cls(src, expected))
        try:
            return compiling()
        finally:
            launcher.join()

    return both


@cache
def _mode() -> Any:
    from triton import AsyncCompileMode

    class Together(AsyncCompileMode):
        """While active, the first kernel that is not there has all of the pass compiled in threads."""

        def __init__(self, run: Callable[[], object]) -> None:
            super().__init__(None, ignore_errors=True)
            self.executor: ThreadPoolExecutor | None = None
            self.run, self.collecting = run, False

        def submit(self, key: Any, compiling: Callable[[], Any], *rest: Any) -> Any:
            first = self.executor is None
            if first:
                self.executor = ThreadPoolExecutor()
            if key not in self.future_kernels:
                compiling = _with_launcher(compiling)
            future = super().submit(key, compiling, *rest)
            if self.collecting:
                return None
            if first:
                self._collect()
            return future.result()

        def _collect(self) -> None:
            """Run the pass without its kernels, and compile those it would launch."""

            from adatom.tiles import launch

            here = get_ident()

            def take(kernel: Any, args: tuple[Any, ...], meta: dict[str, Any], spill: int) -> Any:
                fusion = meta.pop("enable_fp_fusion")
                if get_ident() == here:  # Triton knows a kernel by the order of its options too
                    return kernel.warmup(*args, grid=(1,), enable_fp_fusion=fusion, **meta)
                # a launch of another thread, which is meant
                programs = sys._getframe(1).f_locals["programs"]
                with _collecting:
                    pass
                return launch.launch(kernel, programs, args, meta, spill)

            with _collecting:
                self.collecting = True
                try:
                    with launch.observed(take):
                        self.run()
                except Exception:
                    pass
                finally:
                    self.collecting = False

        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            if self.executor is not None:
                self.executor.shutdown()

    return Together


def together(launch: Callable[..., Any], *args: Any) -> Any:
    """launch(*args); the kernels that it launches and that are not compiled yet are compiled side by side."""
    if interpreting() or not on_gpu(launch.__module__):
        return launch(*args)
    from triton.runtime._async_compile import active_mode

    if active_mode.get() is not None:
        return launch(*args)
    with _undisturbed(), _mode()(lambda: launch(*args)):
        return launch(*args)
