"""Launching past Triton's launcher: the C function must get what that would have given it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import adatom

pytest.importorskip("triton")


class Launcher:
    """Triton 3.6's: it hands its arguments to `launch`, which stands for the C function and notes them."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True

    def __init__(self, metas=()):
        self.taken = []
        self.launch = opened(self.taken, metas) if metas else lambda *args: self.taken.append(args)

    def __call__(self, *args):
        grid_and_function, given = args[:5], args[5:]
        self.launch(*grid_and_function, self.launch_cooperative_grid, self.launch_pdl, None, None, *given)


class Listing(Launcher):
    """That of 3.7 to 3.9, which hands them on as a list, with what describes them."""

    arg_annotations, kernel_signature = ["annotations"], b"signature"

    def __call__(self, *args):
        front, metadata, hooks, given = args[:5], args[5], args[6:9], args[9:]
        more = (self.launch_cooperative_grid, self.launch_pdl, metadata, *hooks, None, None)
        self.launch(*front, *more, self.arg_annotations, self.kernel_signature, given)


class Adding(Listing):
    """One that adds arguments of its own."""

    def __call__(self, *args):
        super().__call__(*args, "more")


class Raising(Listing):
    """One that cannot be asked: it wants a stream."""

    def __call__(self, *args):
        args[3] + 1
        super().__call__(*args)


def opened(taken, tensordesc_meta):
    """A launcher that makes descriptors first, with the names that Triton gives to what it closes over."""

    def launcher(*args):
        taken.append(args)

    return lambda *args: (launcher(*args), tensordesc_meta)


def arguments(args):
    """What follows the launcher's own arguments."""
    return tuple(args[-1]) if isinstance(args[-1], tuple) else args[13:]


@pytest.fixture
def direct(monkeypatch):
    """Makes a Direct of a launcher, for a kernel of 7 programs on stream 77."""
    from triton.runtime import driver

    from adatom.tiles.compat import Direct

    def make(run, blocks=()):
        called = []
        compiled = SimpleNamespace(run=run, function=5, packed_metadata=(4, 1, 0), called=called)
        kernel = type("Compiled", (SimpleNamespace,), {"__getitem__": lambda self, grid: lambda *a: called.append(a)})
        return Direct(kernel(**vars(compiled)), 7, 0, (9, "constant"), blocks), called

    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_stream=lambda device: 77))
    return make


@pytest.mark.parametrize("kind", [Launcher, Listing])
def test_the_c_function_gets_what_tritons_launcher_would_give_it(direct, kind):
    run = kind()
    launch, _ = direct(run)
    assert launch.run == run.launch
    launch([11, 12], None)
    run(7, 1, 1, 77, 5, (4, 1, 0), None, None, None, 11, 12, 9, "constant")
    assert run.taken[0] == run.taken[1] and len(run.taken) == 2


def test_this_tritons_own_launcher_is_passed_by(direct):
    """Its C function is called as it calls it; nothing of it is left to do for each launch."""
    from triton.backends.nvidia.driver import CudaLauncher

    run, taken = object.__new__(CudaLauncher), []
    vars(run).update(dict.fromkeys(("global_scratch_align", "profile_scratch_align"), 1), num_ctas=1)
    vars(run).update(dict.fromkeys(("global_scratch_size", "profile_scratch_size"), 0), gsan_enabled=False)
    vars(run).update(launch_cooperative_grid=False, launch_pdl=True, arg_annotations=[], kernel_signature=b"")
    run.launch = lambda *args: taken.append(args)
    launch, _ = direct(run)
    assert launch.run is run.launch and not taken
    launch([11, 12], None)
    run(7, 1, 1, 77, 5, (4, 1, 0), None, None, None, 11, 12, 9, "constant")
    assert taken[0] == taken[1] and len(taken) == 2


@pytest.mark.parametrize(
    "kind",
    [
        *(type("Other", (Launcher,), of) for of in ({"global_scratch_size": 128}, {"gsan_enabled": True})),
        Adding,
        Raising,
    ],
)
def test_other_launchers_are_called_as_they_are(direct, kind):
    run = kind()
    launch, _ = direct(run)
    assert launch.run is run and not run.taken
    launch([11, 12], None)
    run(7, 1, 1, 77, 5, (4, 1, 0), None, None, None, 11, 12, 9, "constant")
    assert run.taken[0] == run.taken[1]


@pytest.mark.parametrize("kind", [Launcher, Listing])
@pytest.mark.parametrize("make", [lambda made, meta: [made, meta, 64], lambda made, meta, _: [made, meta, 64]])
def test_a_descriptor_is_made_once_for_each_address(direct, monkeypatch, kind, make):
    from triton.backends.nvidia import driver

    monkeypatch.setattr(driver, "make_tensordesc_arg", make)
    run, asked = kind(metas=["a", "b"]), []
    launch, _ = direct(run, (0, 2))
    for first in (11, 11, 12):
        launch([first, 1, 13], lambda i: asked.append(i) or f"box {i}")
    assert asked == [0, 2, 0]
    assert all(arguments(args) == ("box 0", "a", 64, 1, "box 2", "b", 64, 9, "constant") for args in run.taken)
    for first in range(1000):
        launch([first, 1, 13], lambda i: "box")
    assert len(launch.boxes) <= 256


@pytest.mark.parametrize("kind", [type("Other", (Launcher,), {"profile_scratch_size": 8}), Adding])
def test_launchers_that_cannot_be_opened_get_descriptors(direct, kind):
    run = kind(metas=["a"])
    launch, _ = direct(run, (1,))
    for _ in range(2):
        launch([11, 12], lambda i: "box")
    more = ("more",) if kind is Adding else ()
    assert [arguments(args) for args in run.taken] == [(11, "box", 9, "constant", *more)] * 2


def test_profilers_that_hook_into_triton_see_the_launch(direct):
    from triton import knobs

    run = Launcher(metas=["a"])
    launch, called = direct(run, (1,))
    knobs.runtime.launch_enter_hook.add(print)
    try:
        launch([11, 12], lambda i: "box")
    finally:
        knobs.runtime.launch_enter_hook.remove(print)
    assert called == [(11, "box", 9, "constant")] and not run.taken


def test_kernels_whose_programs_wait_for_each_other_take_turns(monkeypatch):
    """A stream waits for the kernels that were last, if in another; nobody in one stream alone, or in a graph."""
    import torch

    from adatom.tiles import launch

    done, now = [], SimpleNamespace(stream=None, capturing=())

    class Stream(SimpleNamespace):
        device_index = 1

        def wait_stream(self, other):
            done.append(f"{self.stream_id} waits for {other.stream_id}")

    class InStream:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            self.stream, now.stream = now.stream, self.stream

        def __exit__(self, *error):
            now.stream = self.stream

    monkeypatch.setattr(launch, "_last", {})
    monkeypatch.setattr(torch.cuda, "stream", InStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.stream.stream_id in now.capturing)

    def taken(*numbers, device="cuda:1"):
        done.clear()
        for n in numbers:
            now.stream = Stream(stream_id=n)
            launch.take_turn(torch.device(device))
            assert now.stream.stream_id == n
        return done

    assert taken(0, 0) == []
    assert taken(1, 1, 3, 0, 0) == ["1 waits for 0", "3 waits for 1", "0 waits for 3"]
    assert taken(1000, 1000, 5) == ["1000 waits for 0", "1000 waits for 0", "5 waits for 0"]  # 1000: not PyTorch's
    now.capturing = (5, 7)
    assert taken(7, 1) == []  # is captured; would wait for one that is
    assert taken(3) == ["3 waits for 1"]
    assert taken(9, device="cpu") == []


PLANNED = """
from dataclasses import dataclass

from adatom.tiles.hopper import gl, gluon, planner


@dataclass(frozen=True)
class Plan:
    N: int

    @property
    def MORE(self):
        return self.N + 1


make_plan = planner(Plan)


@gluon.jit
def kernel(X, N: gl.constexpr):
    PLAN: gl.constexpr = make_plan(N)
    gl.store(X, PLAN.MORE)
"""


def test_tritons_cache_knows_a_kernel_by_its_plans_properties(tmp_path, monkeypatch):
    """A kernel whose own text is the same must not be taken from the cache as another property made it."""

    def key(folder, source):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "planned.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path / folder)
        monkeypatch.delitem(sys.modules, "planned", raising=False)
        module = importlib.import_module("planned")
        assert module.make_plan(3) == module.Plan(3)
        return module.kernel.cache_key

    assert key("one", PLANNED) == key("same", PLANNED) != key("other", PLANNED.replace("N + 1", "N + 2"))


def test_all_plans_of_kernels_are_made_so():
    files = [path.read_text() for path in Path(adatom.__file__).parent.glob("ops/*/hopper*.py")]
    plans = [text for text in files if "\nclass Plan:" in text]
    assert len(plans) >= 7 and all("= planner(Plan)" in text for text in plans)
