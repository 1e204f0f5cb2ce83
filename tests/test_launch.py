"""Launching past Triton's launcher: the C function must get what that would have given it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("triton")


class Launcher:
    """Triton 3.6's: it hands its arguments to `launch`, which stands for the C function and notes them."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True

    def __init__(self, metas=()):
        taken = self.taken = []
        if metas:
            self.launch = opened(lambda *args: taken.append(args), metas)
        else:
            self.launch = lambda *args: taken.append(args)

    def __call__(self, *args):
        grid_and_function, given = args[:5], args[5:]
        self.launch(*grid_and_function, self.launch_cooperative_grid, self.launch_pdl, None, None, *given)


def opened(launcher, tensordesc_meta):
    """A launcher that makes descriptors first, with the names that Triton gives to what it closes over."""
    return lambda *args: (launcher(*args), tensordesc_meta)


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


def test_the_c_function_gets_what_tritons_launcher_would_give_it(direct):
    run = Launcher()
    launch, _ = direct(run)
    assert launch.run == run.launch
    launch([11, 12], None)
    run(7, 1, 1, 77, 5, (4, 1, 0), None, None, None, 11, 12, 9, "constant")
    assert run.taken[0] == run.taken[1] and len(run.taken) == 2


@pytest.mark.parametrize("other", [{"arg_annotations": b""}, {"global_scratch_size": 128}])
def test_other_launchers_are_called_as_they_are(direct, other):
    run = type("Other", (Launcher,), other)()
    launch, _ = direct(run)
    assert launch.run is run
    launch([11, 12], None)
    assert run.taken == [(7, 1, 1, 77, 5, False, True, None, None, (4, 1, 0), None, None, None, 11, 12, 9, "constant")]


def test_a_descriptor_is_made_once_for_each_address(direct, monkeypatch):
    from triton.backends.nvidia import driver

    monkeypatch.setattr(driver, "make_tensordesc_arg", lambda made, meta: [made, meta, 64])
    run, asked = Launcher(metas=["a", "b"]), []
    launch, _ = direct(run, (0, 2))
    for first in (11, 11, 12):
        launch([first, 1, 13], lambda i: asked.append(i) or f"box {i}")
    assert asked == [0, 2, 0]
    assert all(args[13:] == ("box 0", "a", 64, 1, "box 2", "b", 64, 9, "constant") for args in run.taken)
    for first in range(1000):
        launch([first, 1, 13], lambda i: "box")
    assert len(launch.boxes) <= 256


def test_launchers_that_cannot_be_opened_get_descriptors(direct):
    run = type("Other", (Launcher,), {"arg_annotations": b""})(metas=["a"])
    launch, _ = direct(run, (1,))
    for _ in range(2):
        launch([11, 12], lambda i: "box")
    assert [args[13:] for args in run.taken] == [(11, "box", 9, "constant")] * 2


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
