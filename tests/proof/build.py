"""Modules of upstream's classes at small size, with random parameters."""

from __future__ import annotations

import inspect
import re
import sys
import typing
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.proof.configs import HIDDEN, Small

#: Arguments of a constructor of which nothing but the type is known.
PLAIN: dict[str, Any] = {"int": HIDDEN, "float": 1.5, "bool": False}

#: Attributes at whose usual values a formula without them would look the same: names, from which value, another.
TELLING: tuple[tuple[str, Callable[[float], bool], float], ...] = (
    (r"(^|_)eps(ilon)?$", lambda value: value < 1e-2, 0.05),
    (r"limit", lambda value: value > 1, 0.7),
    (r"scal", lambda value: value == 1, 1.5),
    (r"^p$|dropout", lambda value: value == 0, 0.25),
    (r"jitter", lambda value: value == 0, 0.1),
)


#: Sizes that are not one number, by class and parameter: Chameleon's norm has a weight for each head.
SIZES: dict[tuple[str, str], Any] = {
    ("ChameleonLayerNorm", "hidden_size"): (3, HIDDEN),
    ("DebertaLayerNorm", "size"): HIDDEN,
}


class Unbuildable(Exception):
    """A site that the proof cannot run, which counts as a failure."""


def real_config(annotation: Any, module: Any) -> Any:
    """An instance of the configuration class that an annotation names, or None."""
    if isinstance(annotation, str):
        name = annotation.split("|")[0].strip().strip("\"'")
        annotation = vars(module).get(name)
    candidates = typing.get_args(annotation) or (annotation,)
    for candidate in candidates:
        if isinstance(candidate, type) and hasattr(candidate, "model_type"):
            try:
                return candidate()
            except Exception:  # composite configurations want parts; a stand-in serves as well
                return None
    return None


def family_config(module: Any, owner: str) -> Any:
    """The family's configuration whose name shares the longest beginning with a class's."""
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and hasattr(value, "model_type") and value.__name__.endswith("Config")
    ]
    found.sort(key=lambda value: (-_shared(value.__name__, owner), len(value.__name__)))
    for candidate in found:
        try:
            return candidate()
        except Exception:
            continue
    return None


def _shared(one: str, other: str) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def value_for(name: str, parameter: inspect.Parameter, module: Any, owner: str, config: Any = None) -> Any:
    """What to pass for one parameter of a constructor."""
    if (owner, name) in SIZES:
        return SIZES[owner, name]
    if name == "config" or name.endswith("_config"):
        if config is not None:
            return config
        return Small(real_config(parameter.annotation, module) or family_config(module, owner))
    if re.search(r"(^|_)(idx|id|index)$", name):
        return 0
    if name in ("device", "dtype"):
        return None
    found = getattr(Small(), name)
    annotation = str(getattr(parameter.annotation, "__name__", parameter.annotation)).partition(" |")[0]
    return PLAIN.get(annotation) if found is None else found


def build(cls: type[nn.Module], config: Any = None, *, optional: bool = False, **given: Any) -> nn.Module:
    """An instance of ``cls`` with small sizes and random parameters, in eval mode.

    With ``optional``, parameters whose default is None are given, too.

    Raises:
        Unbuildable: its constructor takes none of the values that were tried.
    """
    module = sys.modules[cls.__module__]
    signature = inspect.signature(inspect.unwrap(cls.__init__))
    arguments: dict[str, Any] = {}
    for name, parameter in list(signature.parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in given:
            arguments[name] = given[name]
        elif parameter.default is not parameter.empty and name != "config":
            if optional and parameter.default is None:
                arguments[name] = value_for(name, parameter, module, cls.__name__, config)
        else:
            arguments[name] = value_for(name, parameter, module, cls.__name__, config)
    try:
        return telling(randomise(cls(**arguments))).eval()
    except Exception as error:
        raise Unbuildable(f"{cls.__name__}({arguments}): {type(error).__name__}: {error}") from error


def telling(built: nn.Module) -> nn.Module:
    """Give numbers that hardly matter at their usual values others, with which they do."""
    for part in built.modules():
        for name, value in list(vars(part).items()):
            for pattern, usual, other in TELLING:
                if isinstance(value, float) and re.search(pattern, name) and usual(value):
                    setattr(part, name, other)
    return built


def randomise(built: nn.Module, seed: int = 0) -> nn.Module:
    """Fill every floating parameter and buffer with random values of moderate size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*built.parameters(), *built.buffers()):
            if tensor.is_floating_point() and not tensor.is_meta:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.4 + 0.1)
    return built
