"""Installed modules with their loss sites routed, beside the installed ones and without the import hook.

The text is written where the hook would store it (transformers reads the model's name from the path) and run
under a name of its own inside the upstream package, so that its relative imports work.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from tests.kernels import patched_qwen3
from tests.kernels.patched_qwen3 import batch as batch
from tests.kernels.patched_qwen3 import tiny_config as tiny_config
from tests.patches.idioms.applied import spliced
from veomni_hook.kernels.linear_cross_entropy.output import HELD
from veomni_hook.kernels.slot import Slot
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.idioms.linear_cross_entropy import find as linear_cross_entropy
from veomni_hook.patches.idioms.linear_cross_entropy import sequence_classification
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site, Status

Models: TypeAlias = tuple[nn.Module, nn.Module]
QWEN3 = "transformers.models.qwen3.modeling_qwen3"


def sites(view: ModuleView) -> list[Site]:
    """Return the routed sites of both idioms of the op."""
    found = [*linear_cross_entropy.find(view), *sequence_classification.find(view)]
    return [site for site in found if site.status is Status.ROUTED]


def load(folder: Path, upstream: str = QWEN3) -> ModuleType:
    """Return the routed twin of the module ``upstream``; its text is written below ``folder``."""
    name = f"{upstream}_routed"
    if name in sys.modules:
        return sys.modules[name]
    origin = importlib.util.find_spec(upstream).origin
    view = ModuleView(Document(Path(origin).read_text(encoding="utf-8"), upstream))
    found = sites(view)
    path = folder.joinpath(*upstream.split(".")[1:]).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(spliced(view.document.source, found), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    for slot in {slot for site in found for slot in site.slots}:
        setattr(module, slot.name, Slot(slot.op, slot.variant, name))
    for home, imported in {each for site in found for each in site.imports}:
        exec(f"from {home} import {imported}", vars(module))
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def twins(module: ModuleType, kind: str, config: object) -> Models:
    """Return an upstream model of the class ``kind`` and its routed twin, equal weights, in training mode."""
    upstream = importlib.import_module(module.__name__.removesuffix("_routed"))
    return tuple(patched_qwen3.twins(upstream, module, kind, config))


def pair(module: ModuleType, **changes: object) -> Models:
    """Return the twins of a tiny Qwen3."""
    return twins(module, "Qwen3ForCausalLM", tiny_config(**changes))


def of_experts(folder: Path) -> Models:
    """Return the twins of a tiny Qwen3 of experts."""
    module = load(folder, "transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = module.Qwen3MoeConfig(
        vocab_size=61, hidden_size=32, head_dim=8, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        num_experts=4, moe_intermediate_size=16, num_experts_per_tok=2, decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip
    return twins(module, "Qwen3MoeForCausalLM", config)


def own_loss(logits: torch.Tensor, labels: Any, vocab_size: int, **kwargs: Any) -> torch.Tensor:
    """A loss that only the model's author knows."""
    return logits.sum()


class Watching(TorchFunctionMode):
    """A user's mode that might change what functions of torch return."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Decoder(nn.Module):
    """A head around its Linear; ``after`` is what it does to logits."""

    def __init__(self, after: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.dense, self.out, self.after = nn.Linear(32, 32), nn.Linear(32, 61), after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.out(torch.tanh(self.dense(x)))
        return logits if self.after is None else self.after(logits)


class TrainedCopies(nn.Module):
    """Around a module as PEFT's wrapper for ``modules_to_save``: what it calls depends on the adapters."""

    def __init__(self, module: nn.Module, *adapters: str) -> None:
        super().__init__()
        self.original_module = module.requires_grad_(requires_grad=False)
        copies = {name: copy.deepcopy(module).requires_grad_() for name in adapters}
        self.modules_to_save = nn.ModuleDict(copies)
        self.active_adapter: str | list[str] = [*adapters[:1]]
        self.disable_adapters = False

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.modules_to_save[self.active_adapter[0]], name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        active = [self.active_adapter] if isinstance(self.active_adapter, str) else self.active_adapter
        if self.disable_adapters or not active or active[0] not in self.modules_to_save:
            return self.original_module(x)
        return self.modules_to_save[active[0]](x)


def with_trained_copies(models: Models, *adapters: str) -> Models:
    """Train copies of the heads of both models, one for each adapter, with equal weights."""
    for model in models:
        model.lm_head = TrainedCopies(model.lm_head, *adapters)
        with torch.no_grad():
            for factor, each in enumerate(model.lm_head.modules_to_save.values(), 2):
                each.weight.mul_(factor)
    return models


def with_decoder(models: Models, after: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Models:
    """Give both models a `Decoder` with equal weights as their head."""
    for model in models:
        model.lm_head = Decoder(after)
        model.get_output_embeddings = lambda head=model.lm_head: head.out
    models[1].lm_head.load_state_dict(models[0].lm_head.state_dict())
    return models


def held_logits(output: Any) -> Any:
    """Return what an output holds for its logits, without a read."""
    held = OrderedDict.__dict__["__dict__"].__get__(output)
    return held.get(HELD, held.get("logits"))


def as_library(name: str, source: str) -> Callable[[Any], Any]:
    """Return ``run`` of a library's code, by the name of its module."""
    namespace: dict[str, Any] = {"__name__": name, "pytree": _pytree, "torch": torch}
    exec(source, namespace)
    return namespace["run"]
