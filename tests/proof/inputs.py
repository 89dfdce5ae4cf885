"""Inputs of routed methods: by the names of their parameters, and by the widths of what the module holds.

Where a name leaves several shapes open all of them are offered; those that upstream's body cannot take are
passed over, and a site that no offer reaches is a failure.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.proof.compare import MODE
from tests.proof.configs import EXPERTS, HIDDEN, TOP_K

#: Arguments by name, tensors and others.
Inputs = dict[str, Any]
#: Offers inputs for a method, given by its name, of a module.
Calls = Callable[[nn.Module, str], Iterator[Inputs]]

#: Leading dimensions of hidden states; the last one is a square number of positions, as images need it.
LEADING = ((2, 3), (5,), (2, 4))


#: Arguments that say which part of a module is meant, by class; no shape or name tells them.
OF_ITS_OWN: dict[str, Callable[[Any], Inputs]] = {
    # One MLP serves several layers, each with an adapter of its own, which it finds by the layer's number.
    "Zamba2MLP": lambda owner: {"layer_idx": next(iter(owner.layer_dic))}
}


def positional(owner: nn.Module, method: str = "forward") -> list[inspect.Parameter]:
    """The parameters of a method that must or may be given by position."""
    function = inspect.unwrap(getattr(type(owner), method))
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p for p in list(inspect.signature(function).parameters.values())[1:] if p.kind in kinds]


def required(parameters: Sequence[inspect.Parameter]) -> list[inspect.Parameter]:
    """The first parameter, and those without a default."""
    return [p for number, p in enumerate(parameters) if not number or p.default is p.empty]


def widths(owner: nn.Module) -> list[int]:
    """Widths that the input of a module may have, the likeliest first."""
    linears = [m.in_features for m in owner.modules() if isinstance(m, nn.Linear)]
    vectors = [p.shape[0] for p in owner.parameters() if p.dim() == 1]
    matrices = [p.shape[-1] for p in owner.parameters() if p.dim() > 1]
    return list(dict.fromkeys([*linears, *vectors, HIDDEN, *matrices]))


def norm_calls(owner: nn.Module, method: str) -> Iterator[Inputs]:
    """Inputs of a normalisation: contiguous, strided, one row; with a gate where it takes one."""
    parameters = positional(owner, method)
    width = next(iter([p.shape[-1] for p in owner.parameters()] or widths(owner)))
    for shape in ((2, 3, width), (1, width), (5, 2, width)):
        taken = [p for p in parameters if p in required(parameters) or "gate" in p.name]
        inputs = {p.name: torch.randn(shape) * 2 for p in taken}
        if shape[0] == 5:  # a view whose rows are not next to each other
            inputs = {k: v.transpose(0, 1) for k, v in inputs.items()}
        yield inputs
        if any("gate" in p.name and p.default is None for p in parameters[1:]):
            yield {parameters[0].name: inputs[parameters[0].name]}


def layer_calls(owner: nn.Module, method: str) -> Iterator[Inputs]:
    """Inputs of an MLP or a router: hidden states of every width that may fit."""
    first, *others = required(positional(owner, method))
    own = OF_ITS_OWN.get(type(owner).__name__, lambda _: {})(owner)
    for width, leading in itertools.product(widths(owner), LEADING):
        shape = (*leading, width)
        offers = [_offers(parameter.name, shape) for parameter in others]
        for values in itertools.product(*offers):
            named = {p.name: value for p, value in zip(others, values, strict=True)}
            yield {first.name: torch.randn(shape), **named, **own}


def _offers(name: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    if "id" in name.split("_") or "ids" in name:
        return (torch.randint(0, 4, shape[:-1]),)
    per_expert = torch.randn(EXPERTS)
    return (per_expert,) if "bias" in name else (torch.randn(shape), per_expert)


def expert_calls(owner: nn.Module, method: str) -> Iterator[Inputs]:
    """Inputs of an experts module: tokens, their experts (also twice the same, or none), and weights."""
    first, *others = (p for p in positional(owner, method) if p.default in (p.empty, None))
    for tokens, width in itertools.product((8, 1), widths(owner)):
        for ids in _routings(tokens):
            values = {p.name: _of_experts(owner, p.name, tokens, ids) for p in others}
            yield {first.name: torch.randn(tokens, width), **values}
            if any(value is ids for value in values.values()):
                # Some are told by a mask [tokens, k, experts], where a token may also have no expert.
                mask = functional.one_hot(ids[:, :1] % EXPERTS, EXPERTS)
                mask[:-1:3] = 0
                masked = {name: mask if value is ids else value for name, value in values.items()}
                yield {first.name: torch.randn(tokens, width), **masked}
            else:
                break


def _routings(tokens: int) -> Iterator[torch.Tensor]:
    yield torch.randint(0, EXPERTS, (tokens, TOP_K))
    yield torch.full((tokens, TOP_K), EXPERTS - 1)
    if MODE.device != "cpu":
        return  # upstream's code asserts on other devices that indices are in range
    # EXPERTS: the sentinel of expert parallelism, or an expert without weights.
    yield torch.randint(EXPERTS - 1, EXPERTS + 1, (tokens, TOP_K)).index_fill(
        0, torch.tensor([0]), EXPERTS - 1
    )


def _of_experts(owner: nn.Module, name: str, tokens: int, ids: torch.Tensor) -> Any:
    if name == "expert_size":  # rows of each expert, one of which has none
        share = tokens // EXPERTS
        return [share, 0, *[share] * (EXPERTS - 3), tokens - share * (EXPERTS - 2)]
    if any(word in name for word in ("ind", "selected", "idx", "ids", "expert_id")):
        return ids
    if any(word in name for word in ("weight", "score", "prob", "gates", "routing")):
        return torch.rand(ids.shape)
    # A weight for every expert that there is.
    return torch.rand(tokens, next((p.shape[0] for p in owner.parameters() if p.dim() == 3), EXPERTS))


def packed_rotary_calls(owner: nn.Module, method: str) -> Iterator[Inputs]:
    """Inputs of a rotary method of an attention: hidden states and stacked tables of more positions."""
    states, tables = required(positional(owner, method))
    heads, width = int(owner.num_heads), int(owner.head_size)  # type: ignore[arg-type]
    for batch, length in ((2, 5), (1, 3)):
        yield {
            states.name: torch.randn(batch, length, heads * width),
            tables.name: torch.randn(2, length + 1, 1, 1, width),
        }
