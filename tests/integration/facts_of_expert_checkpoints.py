"""Prints, as JSON, what `from_pretrained` makes of whole and damaged checkpoints of real families.

Run by `test_expert_checkpoints`; in its own process without the hook, to show what transformers does by itself. An outcome
is ``exact``, ``other weights``, or the name of the error with the tensors that it names.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import veomni_hook.install  # noqa: F401
import torch
import transformers
from safetensors.torch import save_file

from tests.checkpoints.small import FAMILIES, model_of, same, saved, stored, transposed
from veomni_hook.checkpoints import CheckpointError, allow_incomplete_experts

Tensors = dict[str, torch.Tensor]


def outcome(folder: Path, model: Any, kind: Any = None, **options: Any) -> Any:
    try:
        loaded = (kind or type(model)).from_pretrained(folder, **options)
    except CheckpointError as error:
        return ["CheckpointError", *error.tensors]
    except Exception as error:
        return [type(error).__name__]
    if kind is not None:
        return "loaded"
    return "exact" if same(loaded.state_dict(), model.state_dict()) else "other weights"


@contextlib.contextmanager
def checkpoint(model: Any, change: Callable[[Tensors], Tensors] | None = None) -> Iterator[Path]:
    """A folder with the model's checkpoint; in one file where it is changed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tensors = saved(model, folder)
        if change is not None:
            for file in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
                file.unlink()
            save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        yield folder


def without(pattern: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: t for n, t in tensors.items() if not re.search(pattern, n)}


def shifted(tensors: Tensors) -> Tensors:
    """Expert 1 of layer 1 is missing, and there is one too many at the end."""
    return {n.replace("layers.1.mlp.experts.1.", "layers.1.mlp.experts.4."): t for n, t in tensors.items()}


def one_more(tensors: Tensors) -> Tensors:
    more = {
        n.replace(".experts.3.", ".experts.4."): t.clone() for n, t in tensors.items() if ".experts.3." in n
    }
    return tensors | more


def experts_in_a_dense_layer(tensors: Tensors) -> Tensors:
    more = {n.replace("layers.1.", "layers.0."): t.clone() for n, t in tensors.items() if ".experts." in n}
    return tensors | more


def families() -> dict[str, Any]:
    """Whole checkpoints: loaded, saved again and compared with the first."""
    found = {}
    for name, family in FAMILIES.items():
        model = model_of(family)
        with checkpoint(model) as folder, tempfile.TemporaryDirectory() as again:
            found[name] = [outcome(folder, model)]
            type(model).from_pretrained(folder).save_pretrained(again, max_shard_size="12KB")
            found[name].append(
                "exact" if same(dict(stored(Path(again))), dict(stored(folder))) else "changed"
            )
    vision = model_of(FAMILIES["qwen3_vl_moe"])
    with checkpoint(vision, transposed) as folder:
        found["transposed"] = [outcome(folder, vision), "exact"]
    return found


def damaged() -> dict[str, Any]:
    qwen, vision, deepseek = (model_of(FAMILIES[n]) for n in ("qwen3_moe", "qwen3_vl_moe", "deepseek_v3"))
    changes: dict[str, tuple[Any, Callable[[Tensors], Tensors], dict[str, Any]]] = {
        "a layer": (qwen, without(r"layers\.1\..*\.experts\."), {}),
        "an expert": (qwen, without(r"layers\.1\..*\.experts\.1\."), {}),
        "the last expert": (qwen, without(r"layers\.1\..*\.experts\.3\."), {}),
        "the last expert, mismatches ignored": (
            qwen,
            without(r"layers\.1\..*\.experts\.3\."),
            {"ignore_mismatched_sizes": True},
        ),
        "a projection": (qwen, without(r"layers\.1\..*\.experts\.1\.up_proj"), {}),
        "shifted": (qwen, shifted, {}),
        "one too many": (qwen, one_more, {}),
        "a fused tensor": (vision, without(r"language_model\.layers\.1\..*\.experts\.down_proj"), {}),
        "experts in a dense layer": (deepseek, experts_in_a_dense_layer, {}),
    }
    found = {}
    for name, (model, change, options) in changes.items():
        with checkpoint(model, change) as folder:
            found[name] = outcome(folder, model, **options)
    return found


def listed() -> dict[str, Any]:
    """The lists of who asks for them (``output_loading_info``): missing and unexpected tensors of experts."""
    qwen = model_of(FAMILIES["qwen3_moe"])
    changes: dict[str, Any] = {
        "whole": None,
        "a layer": without(r"layers\.1\..*\.experts\."),
        "shifted": shifted,
    }
    found: dict[str, Any] = {}
    for name, change in changes.items():
        with checkpoint(qwen, change) as folder:
            _, info = type(qwen).from_pretrained(folder, output_loading_info=True)
        found[name] = {key: sorted(info[key]) for key in ("missing_keys", "unexpected_keys") if info[key]}
    return found


def other_uses() -> dict[str, Any]:
    """What is no damage, or was allowed."""
    model = model_of(FAMILIES["qwen3_moe"])
    base = transformers.Qwen3MoeModel
    found: dict[str, Any] = {}
    with checkpoint(model) as folder:
        found["fewer layers"] = outcome(folder, model, transformers.Qwen3MoeForCausalLM, num_hidden_layers=1)
        found["the base model"] = outcome(folder, model, base)
        found["another head"] = outcome(folder, model, transformers.Qwen3MoeForSequenceClassification)
    with checkpoint(model, without(r"layers\.1\..*\.experts\.")) as folder:
        found["the base model, a layer gone"] = outcome(folder, model, base)
        with allow_incomplete_experts():
            found["a layer gone, allowed"] = outcome(folder, model, base)
    return found


def facts() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"families": families(), "damaged": damaged(), "other": other_uses(), "listed": listed()}


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(json.dumps(facts()))
