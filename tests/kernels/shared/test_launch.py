"""Launches by the handle of what was compiled: when, and with which arguments."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from veomni_hook.kernels.shared import launch as module
from veomni_hook.kernels.shared.launch import Launch

GRID = (2, 1, 1)


class Recorded:
    """Stands for a function of `triton.jit` or for a handle: notes its calls."""

    def __init__(self, result: Any = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.result = result

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append((grid, arguments, options))
            return self.result

        return call


@pytest.fixture
def handle(monkeypatch):
    monkeypatch.setattr(module, "_HANDLES", True)
    return Recorded()


X = torch.zeros(64)


def test_the_first_launch_compiles_and_the_others_take_the_handle(handle):
    function = Recorded(handle)
    launch = Launch(function, 1, 8, 16, num_warps=4)
    launch(GRID, X, 5)
    launch(GRID, X, 6)
    assert function.calls == [(GRID, (X, 5, 8, 16), {"num_warps": 4})]
    assert handle.calls == [(GRID, (X, 6, 8, 16), {})]


def test_what_is_not_aligned_goes_the_general_way(handle):
    function = Recorded(handle)
    launch = Launch(function, 2)
    odd = X[1:]
    launch(GRID, X, odd)
    launch(GRID, X, X)  # what was compiled for the odd one was not kept
    launch(GRID, odd, X)
    launch(GRID, X, X)
    assert [call[1] for call in function.calls] == [(X, odd), (X, X), (odd, X)]
    assert [call[1] for call in handle.calls] == [(X, X)]


def test_releases_with_other_handles_and_the_interpreter_go_the_general_way(handle, monkeypatch):
    interpreted = Recorded(None)
    launch = Launch(interpreted, 1)
    launch(GRID, X)
    launch(GRID, X)
    assert len(interpreted.calls) == 2
    monkeypatch.setattr(module, "_HANDLES", False)
    function = Recorded(handle)
    launch = Launch(function, 1)
    launch(GRID, X)
    launch(GRID, X)
    assert len(function.calls) == 2 and not handle.calls


class Launcher:
    """Has the form of Triton's launcher for CUDA: adds two flags and a scratch, and calls a C function."""

    def __init__(self, launch: Any, **changes: Any) -> None:
        self.launch = launch
        self.global_scratch_size = 0
        self.__dict__.update(changes)

    def __call__(self, x: int, y: int, z: int, stream: Any, function: Any, *arguments: Any) -> None:
        self.launch(x, y, z, stream, function, False, False, None, *arguments)


class Together(Launcher):
    """Passes the kernel's arguments in one tuple, behind their description, as from Triton 3.7 on."""

    def __call__(self, x: int, y: int, z: int, stream: Any, function: Any, *arguments: Any) -> None:
        metadata, own = arguments[:4], arguments[4:]
        self.launch(x, y, z, stream, function, False, False, *metadata, None, None, ["ptr"], b"O", own)


class Reordering(Launcher):
    """Passes the metadata in another order."""

    def __call__(self, x: int, y: int, z: int, stream: Any, function: Any, *arguments: Any) -> None:
        self.launch(x, y, z, stream, function, *arguments[1::-1], *arguments[2:])


class TogetherReordering(Together):
    """Passes one argument more in the tuple."""

    def __call__(self, x: int, y: int, z: int, stream: Any, function: Any, *arguments: Any) -> None:
        super().__call__(x, y, z, stream, function, *arguments, 0)


class Compiled(Recorded):
    """A handle with a launcher whose C function notes its arguments in ``launched``."""

    def __init__(self, launcher: type[Launcher] = Launcher, **changes: Any) -> None:
        super().__init__()
        self.launched: list[Any] = []
        # `append` is a C function, and the arguments are in one tuple.
        self.run = launcher(**{"launch": self.launched.append, **changes})
        self.function, self.packed_metadata = "function", (4, 1, 0)


class Hooks:
    launch_enter_hook: Any = None
    launch_exit_hook: Any = None


class Chain:
    def __init__(self) -> None:
        self.calls: list[Any] = []


@pytest.fixture
def hooks(handle, monkeypatch):
    hooks = Hooks()
    monkeypatch.setattr(module, "_HOOKS", hooks)
    monkeypatch.setattr(module, "_CHAIN", Chain)
    monkeypatch.setattr(module, "_stream", lambda device: ("stream of", device))
    monkeypatch.setattr(module, "_device", lambda: 3)
    return hooks


def raw(compiled: Compiled) -> Any:
    """Return what a launcher's C function is called with, which takes one argument here."""
    found = module._raw_launch(compiled, 4)
    assert found is not None
    noted: list[Any] = []
    launch = Launch(Recorded(compiled), 2, 16)
    launch._compiled = compiled
    launch._raw = found._replace(launch=lambda *them: noted.append(them))
    return launch, noted


def test_a_launcher_of_the_expected_form_gets_addresses(hooks):
    launch, noted = raw(Compiled())
    y = X + 1
    launch((2, 1, 1), X, y, 5)
    launch((4, 1, 1), y, X, 6)
    added = (False, False, None, (4, 1, 0), None, None, None)
    assert noted == [
        (2, 1, 1, ("stream of", 3), "function", *added, X.data_ptr(), y.data_ptr(), 5, 16),
        (4, 1, 1, ("stream of", 3), "function", *added, y.data_ptr(), X.data_ptr(), 6, 16),
    ]


def test_a_launcher_of_later_releases_gets_them_in_one_tuple(hooks):
    launch, noted = raw(Compiled(Together))
    launch((2, 1, 1), X, X, 5)
    added = (False, False, (4, 1, 0), None, None, None, None, None, ["ptr"], b"O")
    own = X.data_ptr(), X.data_ptr(), 5, 16
    assert noted == [(2, 1, 1, ("stream of", 3), "function", *added, own)]


def test_probing_a_launcher_launches_nothing(hooks):
    compiled = Compiled()
    module._raw_launch(compiled, 3)
    assert not compiled.launched and not compiled.calls


@pytest.mark.parametrize(
    "compiled",
    [
        Compiled(Reordering),
        Compiled(TogetherReordering),
        Compiled(launch=lambda *_: None),
        Compiled(global_scratch_size=8),
        Compiled(profile_scratch_size=8),
    ],
    ids=["other order", "one more", "not a C function", "scratch", "profiled"],
)
def test_other_launchers_are_left_to_their_handle(hooks, compiled):
    assert module._raw_launch(compiled, 3) is None
    launch = Launch(Recorded(compiled), 1, 16)
    launch(GRID, X)
    launch(GRID, X)
    assert compiled.calls == [(GRID, (X, 16), {})]


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_that_begins_later_sees_every_launch(hooks, name):
    compiled = Compiled()
    launch, noted = raw(compiled)
    chain = Chain()
    setattr(hooks, name, chain)
    launch(GRID, X, X, 5)
    assert len(noted) == 1 and not compiled.calls
    chain.calls.append(print)
    launch(GRID, X, X, 5)
    assert len(noted) == 1 and len(compiled.calls) == 1
    chain.calls.clear()
    launch(GRID, X, X, 5)
    assert len(noted) == 2
    setattr(hooks, name, print)
    launch(GRID, X, X, 5)
    assert len(noted) == 2 and len(compiled.calls) == 2


def test_what_is_not_aligned_never_gets_the_launcher_of_what_is(hooks):
    launch, noted = raw(Compiled())
    launch(GRID, X[1:], X, 5)
    launch(GRID, X, X[1:], 5)
    assert not noted


@pytest.mark.skipif(not module._HANDLES, reason="this release of Triton has the normal launch")
def test_tritons_launcher_has_the_expected_form(hooks, monkeypatch):
    """That of the installed release, without a GPU."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    active = SimpleNamespace(allocate_default_profile_scratch=lambda *_: None)  # 3.8 asks for it
    monkeypatch.setattr(driver.triton.runtime.driver, "_active", active, raising=False)
    launcher = object.__new__(driver.CudaLauncher)
    for name in ("num_ctas", "launch_cooperative_grid", "launch_pdl", "global_scratch_align"):
        setattr(launcher, name, 0)
    launcher.profile_scratch_align = launcher.global_scratch_size = launcher.profile_scratch_size = 0
    launcher.arg_annotations, launcher.kernel_signature, launcher.gsan_enabled = ["ptr"], b"O", False
    compiled = Compiled()
    launcher.launch, compiled.run = compiled.run.launch, launcher
    found = module._raw_launch(compiled, 3)
    assert found is not None
    assert found.together is (module.TRITON >= (3, 7))
    at = found.fixed.index((4, 1, 0))
    assert found.fixed[at:][:4] == ((4, 1, 0), None, None, None)


def test_a_tensor_that_left_a_transform_has_an_address(hooks):
    left = []
    torch.func.grad(lambda x: [left.append(x), x.sum()][1])(X)
    launch, noted = raw(Compiled())
    launch(GRID, left[0], X, 5)
    assert noted[0][-4:-2] == (X.data_ptr(), X.data_ptr())


def test_a_threads_context_is_entered_once(monkeypatch):
    entered = []
    event = SimpleNamespace(record=lambda: entered.append(threading.get_ident()))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(module, "_THREAD", module._Thread())
    there, here = SimpleNamespace(is_cuda=True), SimpleNamespace(is_cuda=False)
    module.enter_context(here)
    assert not entered
    for _ in range(2):
        module.enter_context(there)
    thread = threading.Thread(target=module.enter_context, args=[there])
    thread.start()
    thread.join()
    assert len(entered) == 2 and entered[0] == threading.get_ident() != entered[1]
