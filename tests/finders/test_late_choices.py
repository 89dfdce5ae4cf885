"""Ops of which `auto` takes no kernel: their places are edited if a kernel is named before the import."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import facts, started

SCRIPT = """
import json, sys, warnings
import veomni_hook.install
from importlib import import_module
module = import_module(sys.argv[1])
from veomni_hook import use_kernels
from veomni_hook.patches.idioms import recognise
read, real = [], recognise.recognise
recognise.recognise = lambda document: read.append(document.module) or real(document)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for ops in ({"rms_norm": "reference"}, {"nn_layer_norm": "reference"}, {"nn_layer_norm": "reference"}):
        with use_kernels(**ops):
            pass
slots = [name for name in vars(module) if name.startswith("veomni_nn_layer_norm")]
print(json.dumps([slots, [str(one.message) for one in told], read]))
"""


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        pytest.param("gpt2", "auto", id="patched, late"),
        pytest.param("bros", "auto", id="with no other op, late", marks=pytest.mark.slow),
        pytest.param("gpt2", "nn_layer_norm=reference", id="patched, before", marks=pytest.mark.slow),
        pytest.param("bros", "nn_layer_norm=reference", id="with no other op, before"),
    ],
)
def test_a_name_that_comes_late_is_told_once(family: str, kernels: str, tmp_path: Path) -> None:
    module = f"transformers.models.{family}.modeling_{family}"
    for _ in ("miss", "hit"):
        process = started("-c", SCRIPT, module, cache=tmp_path, VEOMNI_KERNELS=kernels, VEOMNI_BANNER="0")
        slots, told, read = facts(process)
        assert len(read) == len({*read}), "a choice in every step would read the modules again"
        if kernels == "auto":
            assert not slots and len(told) == 1
            assert f"nn_layer_norm is chosen, but {module} was imported before" in told[0]
        else:
            assert slots and not told
