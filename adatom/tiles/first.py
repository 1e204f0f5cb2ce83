"""The first call of a configuration, for which Triton has kernels to make: what can be made side by side, is.

Triton makes one thing after the other while all processors but one are idle. Its front end holds Python's lock; LLVM,
ptxas, gcc and hashes do not. Whatever goes wrong in a thread is left to Triton, which does it again in its own order.
"""

from __future__ import annotations

import gc
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from threading import Lock, Thread, get_ident
from types import SimpleNamespace
from typing import Any

import torch

from adatom.device import interpreting
from adatom.evidence import on_gpu

_collecting = Lock()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Without Python's garbage collector, which would look at all that PyTorch has imported again and again; and with
    the warnings' filters as they are, which Triton 3.6 sets and sets back, in all threads at once."""
    was = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            yield
    finally:
        if was:
            gc.enable()


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
    """What Triton needs before its first kernel: a C module for the GPU's driver, and a hash of itself."""
    from triton.runtime import driver
    from triton.runtime.cache import triton_key

    return [_quietly(lambda: driver.active), _quietly(triton_key)]


def prepare(load: Callable[[], Any]) -> Any:
    """load(), which imports kernels, beside what Triton needs for them."""
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


def _foresee_launcher(compiling: Callable[[], Any]) -> None:
    """Make the C function that launches the kernel of `compiling`, of which Triton 3.6 has one for each signature.

    It depends on what compiling finds out, too, which is foreseen here. Triton will find it in its cache.
    """
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    if not hasattr(nvidia, "make_launcher"):
        return
    src = inspect.getclosurevars(compiling).nonlocals["src"]
    descriptors = [kind for kind in src.signature.values() if isinstance(kind, str) and kind.startswith("tensordesc")]
    foreseen = SimpleNamespace(
        tensordesc_meta=[{}] * len(descriptors),
        global_scratch_size=0,
        global_scratch_align=1,
        profile_scratch_size=0,
        profile_scratch_align=1,
        launch_cooperative_grid=False,
        launch_pdl=False,
    )
    driver.active.launcher_cls(src, foreseen)


def _with_launcher(compiling: Callable[[], Any]) -> Any:
    """compiling(), beside making what launches its kernel."""
    launcher = _quietly(lambda: _foresee_launcher(compiling))
    try:
        return compiling()
    finally:
        launcher.join()


@cache
def _mode() -> Any:
    from triton import AsyncCompileMode
    from triton.runtime._async_compile import active_mode

    class Together(AsyncCompileMode):
        """While active in a thread, the first kernel it misses has all that `run` launches compiled side by side."""

        def __init__(self, run: Callable[[], object]) -> None:
            super().__init__(None, ignore_errors=True)
            self.executor: ThreadPoolExecutor | None = None
            self.run, self.collecting = run, False

        def submit(self, key: Any, compiling: Callable[[], Any], *rest: Any) -> Any:
            """What Triton asks for a kernel that this process has not: the kernel, or None for it to launch nothing."""
            first = self.executor is None
            if self.executor is None:
                self.executor = ThreadPoolExecutor()
            future = super().submit(key, partial(_with_launcher, compiling), *rest)
            if self.collecting:
                return None
            if first:
                self._collect()
            return future.result()

        def _collect(self) -> None:
            """Run the pass once more, without its kernels, and start to compile those that it would launch."""
            from adatom.tiles import launch

            here = get_ident()

            def take(kernel: Any, args: tuple[Any, ...], meta: dict[str, Any], spill: int) -> Any:
                fusion = meta.pop("enable_fp_fusion")
                if get_ident() == here:
                    # the options in the order of a launch, by which Triton tells kernels apart too
                    kernel.warmup(*args, grid=(1,), enable_fp_fusion=fusion, **meta)
                    return None
                programs = sys._getframe(1).f_locals["programs"]  # another thread's launch, which is meant
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
            try:
                super().__exit__(*error)
            finally:
                active_mode.set(None)
                if self.executor is not None:
                    self.executor.shutdown()

    return Together


def together(launch: Callable[..., Any], *args: Any) -> Any:
    """launch(*args), where the kernels that it launches and that are not there yet are compiled side by side."""
    if interpreting() or not on_gpu(launch.__module__):
        return launch(*args)
    from triton.runtime._async_compile import active_mode

    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    if active_mode.get() is not None or capturing:  # a graph would hold what the pass does without its kernels
        return launch(*args)
    with _undisturbed(), _mode()(lambda: launch(*args)):
        return launch(*args)
