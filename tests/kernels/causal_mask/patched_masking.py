"""The masking functions of the installed transformers, and those that the idiom changes, without the hook."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, masking_utils

from tests.importing import exec_module
from veomni_hook.patches.engine import Origin, patch_source

NAMES = ("find_packed_sequence_indices", "_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")
UPSTREAM = masking_utils.__name__
SOURCE = Path(inspect.getsourcefile(masking_utils)).read_text(encoding="utf-8")
#: Every function that makes a mask, as the installed release names them.
MASKS = {
    name: function
    for name, function in vars(masking_utils).items()
    if name.startswith("create_") and "mask" in name and inspect.isfunction(function)
    if function.__module__ == UPSTREAM
}
WIDTH = 4


@cache
def patched_text() -> str:
    return patch_source(
        SOURCE, [], Origin(UPSTREAM, "masking_utils.py", "transformers", "test"), idioms=True
    ).text


@contextmanager
def patched() -> Iterator[None]:
    """Exchange the changed functions in the installed module; everything that calls them gets the new ones."""
    copy = types.ModuleType(UPSTREAM)
    copy.__package__ = "transformers"
    exec_module(copy, compile(patched_text(), "patched masking_utils", "exec"))
    held = {name: getattr(masking_utils, name) for name in NAMES}
    try:
        for name in NAMES:
            setattr(masking_utils, name, getattr(copy, name))
        yield
    finally:
        for name, function in held.items():
            setattr(masking_utils, name, function)


def tiny(**changes: Any) -> LlamaConfig:
    """A config for masks; ``changes`` are set as attributes, and may be ones that the class does not have."""
    config = LlamaConfig(
        vocab_size=31, hidden_size=WIDTH, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, attn_implementation=changes.pop("attention", "sdpa"),
    )  # fmt: skip
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def call(
    name: str, config: Any, embeds: torch.Tensor, positions: Any = None, seen: int = 0, **given: Any
) -> Any:
    """Call a mask function of any release with those arguments that it has."""
    function = MASKS[name]
    offered = {
        "config": config, "inputs_embeds": embeds, "attention_mask": None, "past_key_values": None,
        "cache": None, "position_ids": positions, **given,
    }  # fmt: skip
    parameters = inspect.signature(function).parameters
    if "cache_position" in parameters:
        offered["cache_position"] = torch.arange(seen, seen + embeds.shape[1])
    return function(**{key: value for key, value in offered.items() if key in parameters})


def takes(name: str, parameter: str) -> bool:
    return parameter in inspect.signature(MASKS[name]).parameters


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="eager", fullgraph=True, **options)
