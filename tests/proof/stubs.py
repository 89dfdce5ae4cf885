"""Models without their layers: everything around a forward's tail answers, and the tail itself runs for real."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from typing import Any

import torch
from torch import nn

from tests.proof.build import Unbuildable, family_config, randomise
from tests.proof.configs import EXPERTS, HIDDEN, TOP_K, Small

__all__ = ["Inner", "Output", "model_around"]

LAYERS = 2


class Output:
    """What an inner model returns: hidden states under every name that stands for them, None otherwise."""

    def __init__(self, hidden: torch.Tensor, router_logits: tuple[torch.Tensor, ...]) -> None:
        self._hidden = hidden
        self._router_logits = router_logits

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "router_logits":
            return self._router_logits
        if name in ("last_hidden_state", "decoder_hidden_states_", "sequence_output"):
            return self._hidden
        return None

    def __getitem__(self, item: Any) -> Any:
        return self._hidden if item == 0 else None if isinstance(item, int) else ()

    def __contains__(self, item: object) -> bool:
        return False

    def __len__(self) -> int:
        return 1


class Inner(nn.Module):
    """Stands for the inner model: returns the hidden states that it holds, whatever it is called with."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = nn.Parameter(hidden)
        self.router = nn.Parameter(torch.randn(LAYERS, hidden.shape[0] * hidden.shape[1], EXPERTS))
        self.dtype = hidden.dtype
        self.config = Small()

    def forward(self, *_: Any, **__: Any) -> Output:
        """Answer."""
        # Not a leaf: heads that work in place would raise.
        return Output(self.hidden * 1, tuple(self.router.unbind()))


def model_around(cls: type[nn.Module], forward: ast.FunctionDef, head: str, hidden: torch.Tensor) -> nn.Module:
    """An instance of a model class whose inner model is an `Inner`, with a real head and a small configuration.

    Raises:
        Unbuildable: the head cannot be built.
    """
    module = sys.modules[cls.__module__]
    owner = cls.__new__(cls)
    nn.Module.__init__(owner)
    config = Small(family_config(module, cls.__name__), return_dict=True, use_return_dict=True)
    owner.__dict__["config"] = config
    owner.__dict__["loss_type"] = _loss_type(cls)
    owner.__dict__["num_experts"], owner.__dict__["num_experts_per_tok"] = EXPERTS, TOP_K
    owner.__dict__["router_aux_loss_coef"] = 0.1
    assigned = _assignments(cls)
    used = {
        node.attr
        for node in ast.walk(forward)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    called = {
        node.func.attr
        for node in ast.walk(forward)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name) and node.func.value.id == "self"
    }
    head_name = head.removeprefix("self.").split(".")[0]
    setattr(owner, head_name, _head(owner, cls, head_name, assigned, config, module))
    for name in sorted(used - {head_name, "config", "loss_function", "training"}):
        if hasattr(owner, name):
            continue
        if name in called:
            setattr(owner, name, Inner(hidden))
        else:
            value = _evaluate(assigned.get(name), owner, config, module)
            owner.__dict__[name] = getattr(config, name) if value is None else value
    if not any(isinstance(child, Inner) for child in owner.children()):
        for name in ("model", "transformer"):
            setattr(owner, name, Inner(hidden))
    randomise(getattr(owner, head_name))
    return owner.train()


def _loss_type(cls: type) -> str:
    from transformers.loss.loss_utils import LOSS_MAPPING

    found = [name for name in LOSS_MAPPING if name in cls.__name__]
    return max(found, key=len) if found else "ForCausalLM"


def _assignments(cls: type) -> dict[str, ast.expr]:
    """What the constructors of a class assign to attributes, the most derived first."""
    found: dict[str, ast.expr] = {}
    for base in cls.__mro__:
        init = vars(base).get("__init__")
        if init is None or not base.__module__.startswith("transformers.models"):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(init))))
        except (OSError, TypeError, SyntaxError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                found.setdefault(node.targets[0].attr, node.value)
    return found


def _evaluate(expression: ast.expr | None, owner: nn.Module, config: Small, module: Any) -> Any:
    if expression is None:
        return None
    code = compile(ast.Expression(expression), "<init>", "eval")
    try:
        return eval(code, {**vars(module), "self": owner, "config": config})  # noqa: S307 - upstream's own code
    except Exception:
        return None


def _head(
    owner: nn.Module, cls: type, name: str, assigned: dict[str, ast.expr], config: Small, module: Any
) -> nn.Module:
    built = _evaluate(assigned.get(name), owner, config, module)
    if not isinstance(built, nn.Module):
        raise Unbuildable(f"{cls.__name__}.{name} cannot be built from its constructor")
    linears = [m for m in built.modules() if isinstance(m, nn.Linear)]
    if not linears or linears[-1].out_features > 4096 or linears[0].in_features != HIDDEN:
        raise Unbuildable(f"{cls.__name__}.{name} is no small head: {built}")
    return built
