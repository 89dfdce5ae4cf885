"""Builds the Qwen3 module that idioms route beside the installed one, without the import hook.

The text is written where the hook would store it (transformers reads the model's name from the path) and run
under a name of its own inside the upstream package, so that its relative imports work.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import Qwen3Config
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from tests.kernels.matching import close, grads_of
from veomni_hook.patches.engine import Origin, patch_source

UPSTREAM = "transformers.models.qwen3.modeling_qwen3"
NAME = f"{UPSTREAM}_with_slots"
#: Of models that run in milliseconds.
SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip


def load(folder: Path, upstream: str = UPSTREAM, package: str = "transformers") -> ModuleType:
    """Return the patched form of the module ``upstream``, whose source is written below ``folder``."""
    name = f"{upstream}_with_slots"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.find_spec(upstream)
    origin = Origin(upstream, found.origin, package, importlib.metadata.version(package))
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


def config_of(family: str, name: str, **sizes: object) -> Any:
    """Return a config of the family's class ``name``."""
    home = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    return getattr(home, name)(**sizes)


def twins(
    upstream: ModuleType, patched: ModuleType, kind: str, config: object, std: float | None = None
) -> list[Any]:
    """Return upstream's model of the class ``kind`` and the patched one, in training mode, with equal weights.

    With ``std``, all weights are normal numbers of that size.
    """
    models = [getattr(each, kind)(config).train() for each in (upstream, patched)]
    if std is not None:
        for parameter in models[0].parameters():
            torch.nn.init.normal_(parameter, 0.0, std)
    models[1].load_state_dict(models[0].state_dict())
    return models


def tiny_config(**changes: object) -> Qwen3Config:
    """Return the config of a model that runs in milliseconds."""
    return Qwen3Config(**{**SIZES, "tie_word_embeddings": False, **changes})


def pair(module: ModuleType, **changes: object) -> tuple[Qwen3ForCausalLM, Qwen3ForCausalLM]:
    """Return an upstream and a patched model with equal weights, in training mode."""
    upstream, patched = twins(modeling_qwen3, module, "Qwen3ForCausalLM", tiny_config(**changes))
    return upstream, patched


def batch(rows: int = 2, length: int = 12) -> dict[str, torch.Tensor]:
    """Return token ids and labels, some of them ignored."""
    input_ids = torch.randint(0, 61, (rows, length))
    labels = input_ids.clone()
    labels[:, :3] = -100
    return {"input_ids": input_ids, "labels": labels}


def trained(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of a training step, and the gradient of every parameter that has one."""
    model.zero_grad()
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    # A compiled model has names of its own.
    return loss.detach(), {name.removeprefix("_orig_mod."): each for name, each in grads_of(model).items()}


def assert_equal_steps(found: Any, expected: Any) -> None:
    """Compare what `trained` returns."""
    close(found[0], expected[0], 1e-5)
    close(found[1], expected[1], 1e-4)
