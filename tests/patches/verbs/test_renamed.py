"""Replacements whose parameters upstream has renamed since, and still takes by their old names."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from veomni_hook.errors import SignatureError
from veomni_hook.patches.engine import PatchedSource

UPSTREAM = """\
import functools

def renamed(old, until, *, new_name):
    def wrap(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            if old in kwargs:
                kwargs[new_name] = kwargs.pop(old)
            return function(*args, **kwargs)
        return call
    return wrap


class Layer:
    @renamed("past", "9.9", new_name="cache")
    def forward(self, x, cache=None, **kwargs):
        return x, cache, kwargs


class Model:
    def __init__(self):
        self.layer = Layer()

    @renamed("past", "9.9", new_name="cache")
    def forward(self, x, cache=None):
        return self.layer.forward(x, cache=cache, use=1)


@renamed("past", "9.9", new_name="cache")
def mask(x, *, cache):
    return x, cache
"""
OVERRIDES = {
    "a body": "def forward(self, x, past=None, **kwargs):\n    '''Doc.'''\n    return x, past, kwargs\n",
    "one line": "def forward(self, x, past=None, **kwargs): return x, past, kwargs\n",
    "by keyword": "def forward(self, x, *, past=None, **kwargs):\n    kept = past\n    return x, kept, kwargs\n",
}


def scope(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(text, "patched", "exec"), names)
    return names


@pytest.fixture
def applied(
    patched: Callable[..., PatchedSource], load: Callable[..., ModuleType]
) -> Callable[..., PatchedSource]:
    def apply(code: str, verb: str = 'override_method("Layer.forward")') -> PatchedSource:
        return patched(UPSTREAM, f"{HEAD}@config.{verb}\n{code}")

    return apply


HEAD = "from veomni_hook import PatchConfig\nconfig = PatchConfig('pkg.upstream')\n"


@pytest.mark.parametrize("override", OVERRIDES)
def test_a_replacement_takes_the_new_name_and_the_old(
    override: str, applied: Callable[..., PatchedSource]
) -> None:
    result = applied(OVERRIDES[override])
    names = scope(result.text)
    assert names["Model"]().forward(1, cache=2) == (1, 2, {"use": 1})
    assert names["Layer"]().forward(1, past=2) == (1, 2, {})
    (remark,) = result.report.remarks
    assert remark.harmless and remark.target == "Layer.forward"
    assert remark.what.startswith("renamed: past is cache in this pkg, and takes the old name until 9.9")


def test_functions_and_classes_too(applied: Callable[..., PatchedSource]) -> None:
    names = scope(applied("def mask(x, *, past): return past, x\n", 'replace_function("mask")').text)
    assert names["mask"](1, cache=2) == names["mask"](1, past=2) == (2, 1)
    code = "class New:\n    def forward(self, x, past=None, **kwargs):\n        return past, kwargs\n"
    names = scope(applied(code, 'replace_class("Layer")').text)
    assert names["Model"]().forward(1, cache=2) == (2, {"use": 1})


def test_a_replacement_that_uses_the_new_name_for_something_else_is_an_error(
    applied: Callable[..., PatchedSource],
) -> None:
    code = "def forward(self, x, past=None, **kwargs):\n    cache = {}\n    return x, past, cache, kwargs\n"
    with pytest.raises(SignatureError, match=r"nobody passes past .*: upstream has cache \(for past\)"):
        applied(code)


def test_new_names_stay(applied: Callable[..., PatchedSource]) -> None:
    code = "def forward(self, x, cache=None, past=None, **kwargs):\n    return x, cache, past, kwargs\n"
    result = applied(code)
    assert "past = cache" not in result.text and not result.report.remarks
