"""One prover an op: builds a site, runs it through its guard and through upstream's body, and compares.

The guarded path runs the op's reference kernel; upstream's body runs in the same object with ``eager``
chosen, so that both see the same parameters.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests.proof.build import Unbuildable, build
from tests.proof.compare import Run, agree, run
from tests.proof.configs import EXPERTS, HIDDEN, TOP_K
from veomni_hook.kernels.slot import Slot
from veomni_hook.kernels.state import get_choice, set_choice

__all__ = [
    "DTYPES",
    "Inputs",
    "both",
    "class_prover",
    "expert_calls",
    "layer_calls",
    "norm_calls",
    "slots_of",
    "with_kernels",
]

DTYPES = (torch.float32, torch.bfloat16)
Inputs = dict[str, torch.Tensor]


def slots_of(module: Any, op: str) -> list[Slot]:
    """The slots of a patched module for one op."""
    return [value for value in vars(module).values() if isinstance(value, Slot) and value.op == op]


def with_kernels(choice: str, call: Callable[[], Run]) -> Run:
    """Run something under a choice of kernels."""
    before = get_choice()
    set_choice(choice)
    try:
        return call()
    finally:
        set_choice(before)


def both(
    module: Any, op: str, owner: nn.Module, call: Callable[..., Any], inputs: Inputs
) -> tuple[Run, Run, set[str], list[str]]:
    """Run upstream's body and the guarded path; also the variants that were taken, and refusals."""
    expected = with_kernels("eager", lambda: run(call, inputs, owner))
    slots = slots_of(module, op)
    for slot in slots:
        slot._outcomes.clear()
    found = with_kernels("reference", lambda: run(call, inputs, owner))
    outcomes = [(slot, held[1][0]) for slot in slots for held in slot._outcomes.values()]
    taken = {slot.variant for slot, outcome in outcomes if outcome.backend == "reference"}
    refusals = [
        f"{slot.variant}: {outcome.reason}" for slot, outcome in outcomes if outcome.backend != "reference"
    ]
    return expected, found, taken, refusals


def prove_class(site: Any, module: Any, calls: Callable[[Any, nn.Module], Iterator[Inputs]]) -> str:
    """Prove a site in a class's method, over flags of the instance and dtypes."""
    name, _, method = site.target.partition(".")
    cls = getattr(module, name)
    wanted = set(site.variant.split("|")) - {""}
    reached: set[str] = set()
    notes: list[str] = []
    bitwise = True
    for owner in instances(cls):
        for dtype in DTYPES:
            owner.to(dtype)
            for inputs in calls(owner, owner):
                typed = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
                bound = getattr(owner, method.split(".")[0])
                try:
                    expected, found, taken, refused = both(module, site.op, owner, bound, typed)
                except (
                    TypeError,
                    RuntimeError,
                    IndexError,
                    AttributeError,
                    ValueError,
                    AssertionError,
                ) as error:
                    notes.append(
                        f"{ {k: list(v.shape) for k, v in typed.items()} }: {type(error).__name__}: {error}"
                    )
                    continue
                notes += refused
                if taken:
                    bitwise &= agree(expected, found, dtype=dtype)
                    reached |= {f"{variant}@{dtype}" for variant in taken}
    missing = [f"{v}@{d}" for v in wanted for d in DTYPES if f"{v}@{d}" not in reached]
    if missing or not wanted:
        raise Unbuildable(f"no call reached {missing}: {'; '.join(dict.fromkeys(notes)) or 'no calls'}"[:600])
    return "equal" if bitwise else "rounding"


def instances(cls: type[nn.Module]) -> Iterator[nn.Module]:
    """The class as built, with its optional arguments, and with each of its flags turned, alone and together."""
    failure: Unbuildable | None = None
    built: list[bool] = []
    for optional in (False, True):
        try:
            yield build(cls, optional=optional)
            built.append(optional)
        except Unbuildable as error:
            failure = failure or error
    if failure is not None and not built:
        raise failure
    first = build(cls, optional=built[0])
    flags = [
        name
        for name, value in vars(first).items()
        if isinstance(value, bool) and not name.startswith("_") and name != "training"
    ]
    for count in (1, 2):
        for turned in itertools.combinations(flags[:5], count):
            owner = build(cls, optional=built[0])
            for name in turned:
                setattr(owner, name, not getattr(owner, name))
            yield owner


def first_width(owner: nn.Module) -> list[int]:
    """Widths that the input of a module may have, the likeliest first."""
    linears = [m.in_features for m in owner.modules() if isinstance(m, nn.Linear)]
    vectors = [p.shape[0] for p in owner.parameters() if p.dim() == 1]
    matrices = [p.shape[-1] for p in owner.parameters() if p.dim() > 1]
    return list(dict.fromkeys([*linears, *vectors, HIDDEN, *matrices]))


def positional(owner: nn.Module, method: str = "forward") -> list[inspect.Parameter]:
    """The parameters of a method that must or may be given by position."""
    function = inspect.unwrap(getattr(type(owner), method))
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p for p in list(inspect.signature(function).parameters.values())[1:] if p.kind in kinds]


def norm_calls(site: Any) -> Callable[[Any, nn.Module], Iterator[Inputs]]:
    """Inputs of a normalisation: contiguous, strided, one row; with a gate where it takes one."""

    def calls(_: Any, owner: nn.Module) -> Iterator[Inputs]:
        parameters = positional(owner)
        width = next(iter([p.shape[-1] for p in owner.parameters()] or first_width(owner)))
        for shape in ((2, 3, width), (1, width), (5, 2, width)):
            inputs = {}
            for number, parameter in enumerate(parameters):
                if number == 0 or parameter.default is parameter.empty or "gate" in parameter.name:
                    inputs[parameter.name] = torch.randn(shape) * 2
            if shape[0] == 5:  # a view whose rows are not next to each other
                inputs = {k: v.transpose(0, 1) for k, v in inputs.items()}
            yield inputs
            if any("gate" in p.name and p.default is None for p in parameters[1:]):
                yield {parameters[0].name: inputs[parameters[0].name]}

    return calls


def layer_calls(site: Any) -> Callable[[Any, nn.Module], Iterator[Inputs]]:
    """Inputs of an MLP or a router: hidden states of every width that may fit."""

    def calls(_: Any, owner: nn.Module) -> Iterator[Inputs]:
        parameters = positional(owner, site.target.partition(".")[2].split(".")[0])
        for width in first_width(owner):
            for shape in ((2, 3, width), (5, width)):
                inputs: Inputs = {}
                for number, parameter in enumerate(parameters):
                    if number and parameter.default is not parameter.empty:
                        continue
                    if "id" in parameter.name.split("_") or "ids" in parameter.name:
                        inputs[parameter.name] = torch.randint(0, 4, shape[:-1])
                    else:
                        inputs[parameter.name] = torch.randn(shape)
                yield inputs

    return calls


def expert_calls(site: Any) -> Callable[[Any, nn.Module], Iterator[Inputs]]:
    """Inputs of an experts module: tokens, their experts (also duplicates), and weights."""

    def calls(_: Any, owner: nn.Module) -> Iterator[Inputs]:
        parameters = positional(owner)
        for tokens in (6, 1):
            for ids in (torch.randint(0, EXPERTS, (tokens, TOP_K)), torch.full((tokens, TOP_K), EXPERTS - 1)):
                inputs: Inputs = {}
                for number, parameter in enumerate(parameters):
                    name = parameter.name
                    if number == 0:
                        inputs[name] = torch.randn(tokens, HIDDEN)
                    elif any(word in name for word in ("ind", "selected", "idx", "ids", "expert_id")):
                        inputs[name] = ids
                    elif any(word in name for word in ("weight", "score", "prob", "gates", "routing")):
                        inputs[name] = torch.rand(tokens, TOP_K)
                yield inputs

    return calls


def class_prover(
    calls: Callable[[Any], Callable[[Any, nn.Module], Iterator[Inputs]]],
) -> Callable[[Any, Any], str]:
    """The prover of an op whose sites are methods of classes that can be built alone."""
    return lambda site, module: prove_class(site, module, calls(site))
