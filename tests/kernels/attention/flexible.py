"""Lets torch's flex_attention compute gradients on a CPU, and our kernel of it run there.

torch refuses gradients on a CPU, because Inductor has no code for them. What autograd and dynamo make of our
code is the same there; so tests take this check away, and run the graphs without Inductor.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention

from veomni_hook.kernels.attention import flex
from veomni_hook.kernels.selection.declaration import Requirement
from veomni_hook.kernels.selection.registry import registry

SHORTEST = 4


@contextmanager
def on_a_cpu() -> Iterator[None]:
    """Run the backend ``flex`` on a CPU and under ``auto``, from `SHORTEST` queries on."""
    if torch.cuda.is_available():
        pytest.skip("Triton's kernels for tensors of a CPU are compiled here")
    checked = flex_attention._validate_device
    before = flex.SHORTEST, flex.MULTIPLE_COMPILED, flex._BACKEND, flex._COMPILED
    flex_attention._validate_device = lambda *tensors: None
    flex.SHORTEST, flex.MULTIPLE_COMPILED, flex._BACKEND, flex._COMPILED = SHORTEST, 1, "aot_eager", {}
    try:
        with registry.restored(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for kernel in registry.kernels():
                if kernel.backend == "flex":
                    registry.replace(replace(kernel, requires=Requirement(devices=("cpu",)), automatic=True))
            yield
    finally:
        flex_attention._validate_device = checked
        flex.SHORTEST, flex.MULTIPLE_COMPILED, flex._BACKEND, flex._COMPILED = before


def upstreams_mask(*shape: int, dtype: torch.dtype = torch.float32, **how: Any) -> torch.Tensor:
    """Return a mask for eager attention, ``[batch, 1, queries, keys]``, from transformers' own function."""
    from transformers import LlamaConfig, masking_utils

    from veomni_hook.kernels.attention.masks import watch

    watch()
    batch, queries = shape
    config = LlamaConfig(sliding_window=how.pop("window", None), attn_implementation="eager")
    create = (
        masking_utils.create_causal_mask
        if config.sliding_window is None
        else masking_utils.create_sliding_window_causal_mask
    )
    names = inspect.signature(create).parameters  # in some releases a decorator stands before the function
    arguments = {
        "config": config,
        "attention_mask": None,
        "past_key_values": None,
        "cache": None,
        "cache_position": torch.arange(queries),
        ("inputs_embeds" if "inputs_embeds" in names else "input_embeds"): torch.zeros(
            batch, queries, 1, dtype=dtype
        ),
    } | how
    mask = create(**{name: value for name, value in arguments.items() if name in names})
    assert isinstance(mask, torch.Tensor)
    return mask
