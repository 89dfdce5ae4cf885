"""Models without their layers: everything around a forward's tail answers, and the tail itself runs for real."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from tests.proof.build import Unbuildable, family_config, randomise
from tests.proof.configs import EXPERTS, HIDDEN, TOP_K, Small

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
        if name in ("last_hidden_state", "sequence_output"):
            return self._hidden
        if name == "loss":
            return self._hidden.float().square().mean()
        return None

    def __getitem__(self, item: Any) -> Any:
        return self._hidden if item == 0 else None if isinstance(item, int) else ()

    def keys(self) -> tuple[str, ...]:
        """Nothing that could be handed on with ``**``."""
        return ()

    def __contains__(self, item: object) -> bool:
        return False

    def __len__(self) -> int:
        return 1


class Inner(nn.Module):
    """Stands for the inner model: returns the hidden states that it holds, whatever it is called with.

    Parts that it is asked for are itself; numbers are those of a small configuration.
    """

    def __init__(self, hidden: torch.Tensor, config: Small) -> None:
        super().__init__()
        self.hidden = nn.Parameter(hidden)
        self.router = nn.Parameter(torch.randn(LAYERS, hidden.shape[0] * hidden.shape[1], EXPERTS))
        self.dtype = hidden.dtype
        self.config = config

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or name in ("hidden", "router", "dtype", "config"):
                raise
            if name.startswith("get_"):
                return lambda *_, **__: self
            answer = getattr(Small(), name)
            return self if answer is None else answer

    def forward(self, *_: Any, **__: Any) -> Output:
        """Answer."""
        # Not a leaf: heads that work in place would raise.
        return Output(self.hidden * 1, tuple(self.router.unbind()))


def model_around(
    cls: type[nn.Module],
    forward: ast.FunctionDef,
    head: str,
    shape: tuple[int, int],
    also: frozenset[str],
    values: dict[str, Any],
    width: int | None = None,
) -> nn.Module:
    """An instance of a model class whose inner model is an `Inner`, with a real head and a small configuration.

    Args:
        cls: the class.
        forward: its forward.
        head: the attribute that makes logits.
        shape: batch and length of the hidden states.
        also: attributes that are needed and that the forward itself does not mention.
        values: attributes of the configuration.
        width: of the hidden states; None: as a part of the model says that takes them.

    Raises:
        Unbuildable: the head cannot be built.
    """
    module = sys.modules[cls.__module__]
    owner = cls.__new__(cls)
    nn.Module.__init__(owner)
    config = Small(
        family_config(module, cls.__name__), return_dict=True, use_return_dict=True, pad_token_id=0, num_labels=2,
        problem_type=None, **values,
    )  # fmt: skip
    owner.__dict__["config"] = config
    owner.__dict__["loss_type"] = _loss_type(cls)
    owner.__dict__["num_experts"], owner.__dict__["num_experts_per_tok"] = EXPERTS, TOP_K
    owner.__dict__["router_aux_loss_coef"] = 0.1
    maker = _Maker(owner, cls, config, module)
    built = maker.attribute(head)
    if not isinstance(built, nn.Module):
        raise Unbuildable(f"{cls.__name__}.{head} cannot be built: {'; '.join(maker.notes)}")
    found = _width(built, HIDDEN)
    inner: set[str] = set()
    for name in sorted((_used(forward) | also) - {head, "config", "loss_function", "training"}):
        if hasattr(owner, name):
            continue
        value = maker.attribute(name)
        if isinstance(value, nn.Module) and not isinstance(value, PreTrainedModel):
            found = _width(value, found)
        elif name in _receivers(forward) or isinstance(value, nn.Module):
            inner.add(name)
        else:
            owner.__dict__[name] = getattr(config, name) if value is None else value
    hidden = torch.randn(*shape, found if width is None else width)
    for name in sorted(inner) or ("model", "transformer"):
        setattr(owner, name, Inner(hidden, config))
    for child in owner.children():
        if not isinstance(child, Inner):
            randomise(child)
    return owner.train()


def _receivers(forward: ast.FunctionDef) -> set[str]:
    """Attributes of ``self`` that are called, or whose methods are."""
    return {
        node.func.value.attr if isinstance(node.func.value, ast.Attribute) else node.func.attr
        for node in ast.walk(forward)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and "self" in ast.unparse(node.func)
    }


def _width(part: nn.Module, width: int) -> int:
    linears = [m.in_features for m in part.modules() if isinstance(m, nn.Linear)]
    return linears[0] if linears else width


def _used(forward: ast.FunctionDef) -> set[str]:
    return {
        node.attr
        for node in ast.walk(forward)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def _loss_type(cls: type) -> str:
    from transformers.loss.loss_utils import LOSS_MAPPING

    found = [name for name in LOSS_MAPPING if name in cls.__name__]
    return max(found, key=len) if found else "ForCausalLM"


class _Maker:
    """Makes attributes of a model as its constructors would, one by one."""

    def __init__(self, owner: nn.Module, cls: type, config: Small, module: Any) -> None:
        self.owner, self.config, self.module = owner, config, module
        self.notes: list[str] = []
        self.assigned: dict[str, tuple[ast.expr, Any]] = {}
        for base in cls.__mro__:
            init = vars(base).get("__init__")
            if init is None or not base.__module__.startswith("transformers.mod"):
                continue
            if base.__module__ == "transformers.modeling_utils":
                continue
            tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(init))))
            for node in ast.walk(tree):
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                    self.assigned.setdefault(node.targets[0].attr, (node.value, sys.modules[base.__module__]))

    def attribute(self, name: str) -> Any:
        """Make ``self.name``, and what its expression reads from ``self``, on the owner."""
        if name in self.owner.__dict__ or name in self.owner._modules:
            return getattr(self.owner, name)
        expression, home = self.assigned.get(name, (None, self.module))
        if expression is None:
            return None
        for node in ast.walk(expression):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
            ):
                if not hasattr(self.owner, node.attr) and node.attr != name:
                    made = self.attribute(node.attr)
                    if made is None:
                        self.owner.__dict__[node.attr] = getattr(self.config, node.attr)
        names = {n.id for n in ast.walk(expression) if isinstance(n, ast.Name)}
        given = {n: self._local(n) for n in names if n not in vars(home) and n not in ("self", "config")}
        try:
            code = compile(ast.fix_missing_locations(ast.Expression(expression)), "<init>", "eval")
            value = eval(code, {**vars(home), **given, "self": self.owner, "config": self.config})
        except Exception as error:  # what cannot be made alone is the inner model, or no part of the tail
            self.notes.append(f"{ast.unparse(expression)}: {type(error).__name__}: {error}")
            return None
        if isinstance(value, nn.Module) and not isinstance(value, PreTrainedModel):
            setattr(self.owner, name, value)
        elif not isinstance(value, nn.Module):
            self.owner.__dict__[name] = value
        return value

    def _local(self, name: str) -> Any:
        import builtins

        return vars(builtins)[name] if hasattr(builtins, name) else getattr(self.config, name)
