"""Builds the Qwen3 module that idioms route beside the installed one, without the import hook.

The text is written where the hook would store it (transformers reads the model's name from the path) and run
under a name of its own inside the upstream package, so that its relative imports work.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from veomni_hook.patches.engine import Origin, patch_source

UPSTREAM = "transformers.models.qwen3.modeling_qwen3"
NAME = f"{UPSTREAM}_with_slots"
#: Of models that run in milliseconds.
SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip


def load(folder: Path, upstream: str = UPSTREAM) -> ModuleType:
    """Return the patched form of the modeling module ``upstream``, whose source is written below ``folder``."""
    name = f"{upstream}_with_slots"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.find_spec(upstream)
    version = importlib.metadata.version("transformers")
    origin = Origin(upstream, found.origin, "transformers", version)
    patched = patch_source(Path(found.origin).read_text(encoding="utf-8"), [], origin, idioms=True)
    family, file = Path(found.origin).parts[-2:]
    path = folder / "models" / family / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(patched.text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def tiny_config(**changes: object) -> Qwen3Config:
    """Return the config of a model that runs in milliseconds."""
    return Qwen3Config(**{**SIZES, "tie_word_embeddings": False, **changes})


def pair(module: ModuleType, **changes: object) -> tuple[Qwen3ForCausalLM, Qwen3ForCausalLM]:
    """Return an upstream and a patched model with equal weights, in training mode."""
    upstream = Qwen3ForCausalLM(tiny_config(**changes)).train()
    patched = module.Qwen3ForCausalLM(tiny_config(**changes)).train()
    patched.load_state_dict(upstream.state_dict())
    return upstream, patched


def batch(rows: int = 2, length: int = 12) -> dict[str, torch.Tensor]:
    """Return token ids and labels, some of them ignored."""
    input_ids = torch.randint(0, 61, (rows, length))
    labels = input_ids.clone()
    labels[:, :3] = -100
    return {"input_ids": input_ids, "labels": labels}
