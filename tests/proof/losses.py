"""The provers of losses: tails of ``forward`` around a stand-in for the inner model, and auxiliary losses."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.proof.build import Unbuildable
from tests.proof.call_sites import prove_call_site
from tests.proof.compare import Run, agree
from tests.proof.configs import EXPERTS, HIDDEN, TOP_K, VOCABULARY
from tests.proof.provers import DTYPES, both, slots_of, with_kernels
from tests.proof.stubs import Inner, model_around

__all__ = ["prove_linear_cross_entropy", "prove_load_balancing_loss"]

BATCH, LENGTH, LABELS = 2, 7, 5


def forward_of(module: Any, target: str) -> ast.FunctionDef:
    """The upstream definition that a target names."""
    source = Path(str(sys.modules[module.__name__].__spec__.loader.upstream)).read_text(encoding="utf-8")  # type: ignore[union-attr]
    body: list[ast.stmt] = ast.parse(source).body
    for part in target.split("."):
        found = next(s for s in body if isinstance(s, ast.ClassDef | ast.FunctionDef) and s.name == part)
        body = found.body
    assert isinstance(found, ast.FunctionDef)
    return found


def prove_linear_cross_entropy(site: Any, module: Any) -> str:
    """Prove a loss tail or a classifier: loss, logits, gradients of hidden states and of the head."""
    name = site.target.partition(".")[0]
    cls = _concrete(getattr(module, name))
    forward = forward_of(module, site.target)
    head = site.captures.get("head") or site.captures.get("score") or "self.lm_head"
    bitwise = True
    also: frozenset[str] = frozenset()
    for dtype in DTYPES:
        for extra in ({}, {"num_items_in_batch": torch.tensor(5)}) if forward.args.kwarg else ({},):
            while True:
                try:
                    bitwise &= _prove_call(site, module, cls, forward, head, dtype, extra, also)
                    break
                except AttributeError as error:
                    # What a helper of the class reads: made as well, once.
                    if error.name is None or error.name in also or not isinstance(error.obj, cls):
                        raise
                    also |= {error.name}
    return "equal" if bitwise else "rounding"


def _prove_call(
    site: Any,
    module: Any,
    cls: type[nn.Module],
    forward: ast.FunctionDef,
    head: str,
    dtype: torch.dtype,
    extra: dict[str, Any],
    also: frozenset[str],
) -> bool:
    runs: list[Run] = []
    outcomes: list[Any] = []
    for choice in ("eager", "reference"):
        torch.manual_seed(0)
        owner = model_around(cls, forward, head, BATCH, LENGTH, also).to(dtype)
        for inner in owner.modules():
            if isinstance(inner, Inner):
                inner.dtype = dtype
        given = arguments(forward, site.variant) | (extra if site.variant == "next_token" else {})
        given = {
            k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for k, v in given.items()
        }

        def step(owner: nn.Module = owner, given: dict[str, Any] = given) -> Run:
            done = _step(owner, given)
            slots = [slot for slot in slots_of(module, site.op) if slot.variant == site.variant]
            outcomes[:] = [outcome for slot in slots if (outcome := slot.outcome(owner)) is not None]
            return done

        runs.append(with_kernels(choice, step))
    if not any(outcome.backend == "reference" for outcome in outcomes):
        raise Unbuildable(f"the guard was not taken: {outcomes}")
    return agree(*runs, dtype=dtype)


def _concrete(cls: type[nn.Module]) -> type[nn.Module]:
    """A class that can be made: mixins of modeling_layers get the base of a model."""
    if issubclass(cls, nn.Module):
        return cls
    from transformers.modeling_utils import PreTrainedModel

    made = type(
        cls.__name__, (cls, PreTrainedModel), {"__module__": cls.__module__, "base_model_prefix": "model"}
    )
    return made  # type: ignore[return-value]


def arguments(forward: ast.FunctionDef, variant: str) -> dict[str, Any]:
    """What a forward is called with."""
    generator = torch.Generator().manual_seed(3)
    given: dict[str, Any] = {}
    names = [argument.arg for argument in (*forward.args.args[1:], *forward.args.kwonlyargs)]
    required = len(forward.args.args) - 1 - len(forward.args.defaults)
    ids = torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=generator)
    for number, name in enumerate(names):
        if name in ("input_ids", "decoder_input_ids"):
            given[name] = ids
        elif name == "labels":
            if variant == "next_token":
                labels = torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=generator)
                labels[0, 2:4] = -100
                given[name] = labels
            else:
                given[name] = torch.randint(0, 2, (BATCH,), generator=generator)
        elif name in ("attention_mask", "decoder_attention_mask"):
            given[name] = torch.ones(BATCH, LENGTH, dtype=torch.long)
        elif name == "output_router_logits":
            given[name] = True
        elif number < required:
            given[name] = torch.randn(BATCH, LENGTH, HIDDEN)
    return given


def _step(owner: nn.Module, given: dict[str, Any]) -> Run:
    made = owner.forward(**given)  # type: ignore[operator]
    loss = made.loss if hasattr(made, "loss") else made[0]
    if loss is None:
        raise Unbuildable("no loss came out")
    loss.backward()
    result = Run({"loss": loss.detach().clone()})
    logits = getattr(made, "logits", None)
    if isinstance(logits, torch.Tensor):
        result["logits"] = logits.detach().clone()
    for name, parameter in owner.named_parameters():
        if parameter.grad is not None:
            result[f"grad of {name}"] = parameter.grad.clone()
    return result


def prove_load_balancing_loss(site: Any, module: Any) -> str:
    """Prove an auxiliary loss through ``slot.at``: several layers, without and with a mask."""
    if not site.counted:
        return prove_call_site(site, module)
    upstream = getattr(module, site.target)
    slots = [slot for slot in slots_of(module, site.op) if slot.variant == site.variant]
    if not slots:
        raise Unbuildable("the module has no slot for it")
    names = list(inspect.signature(upstream).parameters)
    bitwise = True
    for dtype in DTYPES:
        for mask in (None, torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1] * 7])):
            owner = nn.Module()
            logits = {f"layer{i}": torch.randn(BATCH * LENGTH, EXPERTS).to(dtype) for i in range(3)}

            def call(mask: Any = mask, owner: nn.Module = owner, **layers: torch.Tensor) -> Any:
                values = (tuple(layers.values()), EXPERTS, TOP_K, mask)
                return slots[0].at(owner, upstream)(**dict(zip(names, values, strict=False)))

            expected, found, taken, refused = both(module, site.op, owner, call, logits)
            if not taken:
                raise Unbuildable(f"the guard was not taken: {refused}")
            bitwise &= agree(expected, found, dtype=dtype)
    return "equal" if bitwise else "rounding"
