"""The first call: what is compiled side by side must launch as if it had been compiled in order."""

from __future__ import annotations

import gc
import threading
import time
import warnings
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from adatom.device import interpreting  # noqa: E402
from adatom.tiles import first  # noqa: E402

if interpreting():
    pytest.skip("nothing is compiled", allow_module_level=True)

from adatom.compile import offline  # noqa: E402
from adatom.tiles.launch import Launch, launch  # noqa: E402


@triton.jit
def _one(X, N: tl.constexpr):
    tl.store(X + tl.arange(0, N), 1.0)


@triton.jit
def _two(X, N: tl.constexpr):
    tl.store(X + tl.arange(0, N), 2.0)


@triton.jit
def _wrong(X, N: tl.constexpr):
    tl.store(X + tl.arange(0, N), undefined)  # noqa: F821


class Compiled:
    """What a compiler returns: it notes the launches of its kernel."""

    packed_metadata, function = (), 0

    def __init__(self, name, launched):
        self.name, self.launched = name, launched

    def launch_metadata(self, *_):
        return None

    def run(self, *args):
        self.launched.append(self.name)


@pytest.fixture
def compiler(monkeypatch):
    """In place of Triton's: `launched` and `compiled` note names, `together` is how many compilers ran at once."""
    state = SimpleNamespace(launched=[], compiled=[], running=0, together=0, meanwhile=lambda name: time.sleep(0.05))
    lock = threading.Lock()

    def compile_(src, target=None, options=None, _env_vars=None):
        with lock:
            state.running += 1
            state.together = max(state.together, state.running)
        try:
            state.meanwhile(src.name)
            state.compiled.append(src.name)
        finally:
            with lock:
                state.running -= 1
        if src.name == "_wrong":
            raise ValueError("does not compile")
        return Compiled(src.name, state.launched)

    monkeypatch.setattr("triton.compiler.compile", compile_)
    monkeypatch.setattr(first, "on_gpu", lambda target: True)
    monkeypatch.setattr(first, "_foresee_launcher", lambda compiling: None)
    for kernel in (_one, _two, _wrong):
        kernel.device_caches.clear()
    with offline(90):
        yield state
    for kernel in (_one, _two, _wrong):
        kernel.device_caches.clear()


def run(kernels, x, n):
    for kernel in kernels:
        launch(kernel, 3, (x,), {"N": n, "num_warps": 4})
    return x


def test_a_pass_is_compiled_side_by_side_and_launched_in_order(compiler):
    x = torch.zeros(16)
    assert first.together(run, (_two, _one, _two), x, 16) is x
    assert compiler.launched == ["_two", "_one", "_two"]
    assert sorted(compiler.compiled) == ["_one", "_two"] and compiler.together == 2


def test_what_is_compiled_is_launched_at_once(compiler):
    x, passes = torch.zeros(16), []

    def counted(kernels):
        passes.append(kernels)
        run(kernels, x, 16)

    first.together(counted, (_one, _two))
    first.together(counted, (_one, _two))
    assert len(passes) == 3  # only the first is run twice: once to see what it launches
    first.together(counted, (_one,))
    assert compiler.launched == ["_one", "_two"] * 2 + ["_one"] and len(compiler.compiled) == 2


def test_launches_keep_what_triton_compiled(compiler):
    x, made = torch.zeros(16), [Launch(k, 3, (), {"N": 16, "num_warps": 4}) for k in (_one, _two)]
    first.together(lambda: [one(x) for one in made])
    assert [type(one._direct.compiled) for one in made] == [Compiled] * 2
    assert compiler.launched == ["_one", "_two"]


def test_an_error_of_the_compiler_is_the_callers(compiler):
    x = torch.zeros(16)
    for _ in range(2):
        with pytest.raises(ValueError, match="does not compile"):
            first.together(run, (_one, _wrong, _two), x, 16)
    assert compiler.launched == ["_one", "_one"]
    first.together(run, (_two,), x, 16)
    assert compiler.launched == ["_one", "_one", "_two"] and compiler.compiled.count("_two") == 1


def test_an_error_of_the_pass_is_the_callers(compiler):
    def fails():
        run((_one,), torch.zeros(16), 16)
        raise KeyError("of the pass")

    with pytest.raises(KeyError, match="of the pass"):
        first.together(fails)
    assert compiler.launched == ["_one"]


def test_launches_of_other_threads_are_launched(compiler):
    """While one thread looks at what its pass launches, others mean their launches."""
    x, other = torch.zeros(16), Future()
    run((_two,), x, 16)

    def elsewhere():
        try:
            other.set_result(run((_two,), x, 16))
        except BaseException as error:
            other.set_exception(error)

    begun = []

    def slow():
        begun.append(None)
        observed = len(begun) == 2
        run((_one,), x, 16)
        if observed:
            threading.Thread(target=elsewhere).start()
            time.sleep(0.1)

    first.together(slow)
    assert len(begun) == 2
    assert other.result(timeout=20) is x
    assert compiler.launched.count("_two") == 2 and compiler.launched.count("_one") == 1


def test_a_mode_of_the_callers_is_left_alone(compiler):
    class Executor:
        def submit(self, compiling):
            future = Future()
            future.set_result(compiling())
            return future

    with triton.AsyncCompileMode(Executor()) as mode:
        first.together(run, (_one,), torch.zeros(16), 16)
        assert len(mode.future_kernels) == 1


@triton.jit
def _boxed(D, X, N: tl.constexpr):
    tl.store(X + tl.arange(0, N), D.load([0, 0]).reshape(N) + 1)


def test_launchers_are_foreseen(monkeypatch):
    """What is made beside a kernel is what Triton makes after it."""
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver
    from triton.tools.tensor_descriptor import TensorDescriptor

    if not hasattr(nvidia, "make_launcher"):
        pytest.skip("one launcher serves all kernels")
    made, x = [], torch.zeros(16, 64)

    def launcher(src, metadata):
        made.append(nvidia.make_launcher(src.constants, dict(src.signature), metadata.tensordesc_meta))
        return lambda *args: None

    def run(box):
        launch(_boxed, 3, (box, x), {"N": 1024, "num_warps": 4})

    monkeypatch.setattr(first, "on_gpu", lambda target: True)
    monkeypatch.setattr("triton.compiler.compiler.max_shared_mem", lambda device: 1 << 18)
    with offline(90):
        driver.active.launcher_cls = launcher
        driver.active.utils = SimpleNamespace(load_binary=lambda *args: (1, 2, 0, 0, 1024))
        first.together(run, TensorDescriptor(x, [16, 64], [64, 1], [16, 64]))
    assert len(made) == 2 and made[0] == made[1] and "CUtensorMap" in made[0]


def test_rows_without_kernels_are_just_called():
    assert first.together(lambda *args: args, 1, 2) == (1, 2)


def test_only_the_first_call_of_a_signature_looks(monkeypatch):
    """Also where the launcher remembers nothing, as PyTorch's do."""
    import adatom
    from adatom.ops.attention import api, op

    looked = []

    def together(launch, *args):
        looked.append(launch)
        return launch(*args)

    for module in (api, op):
        monkeypatch.setattr(module, "together", together)
    q = torch.randn(1, 2, 13, 8, requires_grad=True)
    for calls in (1, 2):
        for _ in range(3):
            adatom.attention(q, q, q, scale=0.1234 * calls).sum().backward()
        assert len(looked) == 2 * calls  # a forward and a backward


@pytest.mark.parametrize("enabled", [True, False])
def test_preparing_leaves_the_collector_as_it_was(monkeypatch, enabled):
    def work():
        assert not gc.isenabled()
        return 5

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(first, "_prepared", list)
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        assert first.prepare(work) == 5
        with pytest.raises(ZeroDivisionError):
            first.prepare(lambda: 1 / 0)
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_what_is_prepared_may_fail(monkeypatch):
    ended = []

    def fails():
        time.sleep(0.05)
        ended.append(True)
        raise OSError("no compiler")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(first, "_prepared", lambda: [first._quietly(fails)])
    assert first.prepare(lambda: 5) == 5 and ended == [True]
    monkeypatch.setattr(first, "_prepared", lambda: 1 / 0)
    assert first.prepare(lambda: 6) == 6


@pytest.mark.parametrize(("capturing", "runs"), [(True, 1), (False, 2)])
def test_a_graph_is_captured_without_another_run(compiler, monkeypatch, capturing, runs):
    ran = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    first.together(lambda: (ran.append(1), run((_one,), torch.zeros(16), 16)))
    assert len(ran) == runs


def test_filters_of_warnings_are_left_as_they_were():
    before = list(warnings.filters)
    with first._undisturbed():
        warnings.simplefilter("ignore", ResourceWarning)
    assert warnings.filters == before
