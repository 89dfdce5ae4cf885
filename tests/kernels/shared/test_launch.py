"""Launches by the handle of what was compiled: when, and with which arguments."""

from __future__ import annotations

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
