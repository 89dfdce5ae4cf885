"""Runs a training step of every family and batch on the pretended device; prints when the host would wait.

    python -m tests.multimodal.facts_of_waits [family or text model ...]

The hook is on if the environment has ``FACTS_HOOK=1``. Prints JSON: by family, batch and ``plain``,
``metadata`` (with `collate_metadata`), ``host_values`` (with that setting) or ``absent`` (metadata, and another process
pretends to share the towers; ``called``: what the batch lacks), the operators with the lines that called them, and the loss.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

if os.environ.get("FACTS_HOOK") == "1":
    import veomni_hook.install  # noqa: F401

import torch
import transformers
from packaging.version import Version

from tests.multimodal.families import FAMILIES, accepted, batch, batches, model, packed
from tests.multimodal.pretended import KIND, Waits, on_device, sent
from veomni_hook.kernels.row_merge import rules
from veomni_hook.kernels.selection.declaration import Requirement
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.multimodal import absent, collate_metadata, counts, position_ids
from veomni_hook.multimodal import batches as batches_of


def as_on_cuda() -> None:
    """Let assertions run on the pretended device, which the package expects of CUDA alone."""
    rules._DEVICES += (KIND,)
    counts.asserts = lambda value: isinstance(value, torch.Tensor) and value.device.type == KIND
    for kernel in registry.kernels("row_merge"):
        if kernel.backend == "torch":
            registry.replace(dataclasses.replace(kernel, requires=Requirement()))


def packs(family: str) -> bool:
    """Whether samples can share a row: linear attention has boundaries."""
    return not family.startswith("qwen3_5") or Version(transformers.__version__) >= Version("5.9")


@contextmanager
def shared() -> Iterator[list[str]]:
    """Pretend that another process shares every tower; yields the data for which towers are called with zeros."""
    called: list[str] = []

    def placeholders(names: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        called.append(names[0])
        return own["placeholders"](names, *args, **kwargs)

    pretended = {
        "distributed": SimpleNamespace(
            is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: 2
        ),
        "is_sharded": lambda towers: True,
        # The pretended device has no random numbers of its own.
        "_random_states": lambda device: nullcontext(),
        "placeholders": placeholders,
    }
    own = {name: getattr(absent, name) for name in pretended}
    vars(absent).update(pretended)
    try:
        yield called
    finally:
        vars(absent).update(own)


def waits(made: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """What the host of a step would wait for, forward and backward, and the loss."""
    with Waits() as found:
        loss = made(**inputs, use_cache=False).loss
        forward = sum(found.found.values())
        loss.backward()
        told = {f"{why} {where}": count for (why, where), count in found.found.items()}
    return {
        "forward": forward,
        "backward": sum(found.found.values()) - forward,
        "where": told,
        "loss": loss.detach().held.item(),
    }


def of_text(kind: str) -> dict[str, Any]:
    """Of a text model's step that is given ids alone."""
    fields = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **fields, **sizes, attn_implementation="sdpa")
    ids = torch.randint(0, 64, (2, 12))
    made = on_device(transformers.AutoModelForCausalLM.from_config(config).train())
    return waits(made, sent({"input_ids": ids, "labels": ids}))


def main(*families: str) -> None:
    """Print the waits of every family and batch."""
    as_on_cuda()
    found: dict[str, dict[str, Any]] = {}
    for family in families or FAMILIES:
        if family not in FAMILIES:
            found[family] = of_text(family)
            continue
        made = on_device(model(family))
        add = collate_metadata(made.config)
        every = {name: partial(batch, family, samples) for name, samples in batches(family).items()}
        if packs(family):
            every["packed"] = partial(packed, family, position_ids(made.config))
        for name, inputs in every.items():
            plain = accepted(made, inputs())
            more = add(inputs())
            known = accepted(made, more)
            extra = {
                key: more[key] for key in more.keys() - plain.keys() if key.startswith(("image_", "video_"))
            }
            found.setdefault(family, {})[name] = {
                "plain": waits(made, sent(plain)),
                "metadata": waits(made, sent({**known, **extra})),
                "host_values": waits(made, batches_of.sent(sent, accepted(made, inputs()))),
            }
            with shared() as called:
                found[family][name]["absent"] = {**waits(made, sent({**known, **extra})), "called": called}
    print(json.dumps(found), flush=True)
    # Torch ends the pretended device's threads by aborting the process.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
