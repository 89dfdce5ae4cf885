"""Lets attention in a window run on a CPU, in models of the installed transformers with the patched functions.

torch's flash attention runs on GPUs only: its operator is exchanged for a formula that gets a window, not a
mask.
"""

from __future__ import annotations

import inspect
import sys
import types
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo import symbolic_convert
from torch.nn import functional
from transformers import MistralConfig, MistralForCausalLM, masking_utils
from transformers.integrations import sdpa_attention
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.mistral import modeling_mistral

from tests.importing import exec_module
from veomni_hook.kernels.attention import flash, windows
from veomni_hook.kernels.selection.declaration import Requirement
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.patches.engine import Origin, patch_source

WINDOW, LENGTH = 5, 12
CREATE = "create_sliding_window_causal_mask"
LEFT = torch.tensor([[0, 0, 0, *[1] * (LENGTH - 3)], [1] * LENGTH])
PACKED = torch.tensor([[*range(7), *range(LENGTH - 7)]]).expand(2, -1)
SIZES = {
    "vocab_size": 31, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
#: What masks need of the functions that make them.
_MASKS = (CREATE, "create_causal_mask", "find_packed_sequence_indices", "_ignore_causal_mask_sdpa")


@cache
def patched_code(module: types.ModuleType) -> types.CodeType:
    source = Path(inspect.getsourcefile(module)).read_text(encoding="utf-8")
    origin = Origin(module.__name__, "x.py", "transformers", "test")
    return compile(patch_source(source, [], origin, idioms=True).text, "patched", "exec")


def patched(module: types.ModuleType) -> types.ModuleType:
    """A copy of a module of the installed transformers, as the hook patches it."""
    copy = types.ModuleType(module.__name__)
    copy.__package__ = module.__name__.rpartition(".")[0]
    exec_module(copy, patched_code(module))
    # Dynamo guards on the globals of the module of this name.
    for name, value in vars(copy).items():
        if name.startswith("veomni_") and isinstance(value, types.ModuleType):
            setattr(module, name, value)
    return copy


def window(positions: int, keys: int) -> torch.Tensor:
    """The mask of a window by definition, ``[positions, positions]``."""
    ahead = torch.arange(positions)[:, None] - torch.arange(positions)
    return (ahead >= 0) & (ahead < keys)


def windowed(query, key, value, *others, scale, window_size_left, window_size_right):
    """What the operator computes: ``[batch, length, heads, width]``, causal, in a window."""
    assert others == (None, None, query.shape[1], query.shape[1], 0.0, True, False)
    assert window_size_right == 0
    mask = window(query.shape[1], window_size_left + 1)
    heads = (each.transpose(1, 2) for each in (query, key, value))
    output = functional.scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale, enable_gqa=True)
    return (output.transpose(1, 2),)


@pytest.fixture
def windows_on_a_cpu(monkeypatch):
    """Let the backend ``flash`` run here, in any dtype but float64, for short sequences."""
    monkeypatch.setattr(windows, "_DEVICES", ("cpu",))
    monkeypatch.setattr(flash, "_OPERATOR", windowed)
    monkeypatch.setattr(flash, "_DTYPES", (torch.float32, torch.bfloat16))
    monkeypatch.setattr(flash, "SHORTEST", 2)
    with registry.restored():
        for kernel in registry.kernels():
            if kernel.backend == "flash":
                registry.replace(replace(kernel, requires=Requirement(devices=("cpu",))))
        yield


@pytest.fixture
def slot(monkeypatch):
    """Exchange the functions where models look them up; returns the slot."""
    masks, attention = patched(masking_utils), patched(sdpa_attention)
    for name in _MASKS:
        for module in (masking_utils, modeling_mistral, modeling_gemma3):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(masks, name))
    mapping = masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
    monkeypatch.setitem(mapping, "sliding_attention", getattr(masks, CREATE))
    functions = modeling_mistral.ALL_ATTENTION_FUNCTIONS._global_mapping
    monkeypatch.setitem(functions, "sdpa", attention.sdpa_attention_forward)
    monkeypatch.setitem(sys.modules, sdpa_attention.__name__, attention)
    _forget_imports(sdpa_attention.__name__)
    yield attention.veomni_attention_sliding_window
    _forget_imports(sdpa_attention.__name__)


def _forget_imports(name: str) -> None:
    """Make dynamo look up a module again: it keeps modules, and writes them into globals of compiled code."""
    look_up = getattr(symbolic_convert, "_import_module", None)
    if hasattr(look_up, "cache_clear"):
        look_up.cache_clear()
    alias = f"__import_{name.replace('.', '_dot_')}"
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType):
            vars(module).pop(alias, None)


def model(**changes: Any) -> MistralForCausalLM:
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZES | {"sliding_window": WINDOW} | changes)).train()


def batch(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, 31, (2, length), generator=torch.Generator().manual_seed(1))


def results(network, run=None, ids=None, **inputs: Any) -> list[torch.Tensor]:
    """Loss, logits and all gradients of a model, or of ``run``, which has its parameters."""
    ids = batch() if ids is None else ids
    network.zero_grad()
    output = (network if run is None else run)(input_ids=ids, labels=ids, **inputs)
    output.loss.backward()
    return [output.loss.detach(), output.logits.detach(), *(one.grad.clone() for one in network.parameters())]
