"""One generated module: patched, executed as it is and as patched, and compared.

The original is executed without a single line of ours; the patched module runs with torch's kernels and with
the references. Both are built with the same seed and get the same inputs.
"""

from __future__ import annotations

import itertools
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from tests.importing import exec_module
from tests.proof.compare import Differs, Run, agree, run
from tests.proof.provers import UNFIT, with_kernels
from tests.proof.rotary import layouts
from tests.stress.forms import Form, forms

MODULE = "transformers.models.generated.modeling_generated"
CHOICES = ("torch", "reference")
#: What a module may come to. ``not routed``: no idiom knows it. ``broken``: the original raises for every
#: input. ``upstream's``: routed, and every call was left to the original's code. ``equal``: bit for bit;
#: ``rounding``: within the rounding of the dtype. ``in place``: autograd refuses, because the module changes in
#: place what the kernel keeps for its backward, and the original does not keep it.
OUTCOMES = (
    "not routed", "broken", "upstream's", "equal", "rounding", "in place", "patching fails", "guard fails", "wrong",
)  # fmt: skip
FAILURES = OUTCOMES[-3:]
#: Relative errors that the summing order explains, by dtype; `agree` has its own, smaller ones.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
#: A small error may be that of one value that was rounded to the other side, within a module that rounds to
#: bfloat16 or chooses: a formula that is another one errs with other inputs, too. Of a router no error is too
#: large for that: where two probabilities are equal in float32, the kernel takes the expert of the larger logit.
SMALL, AGAIN = 3e-2, 4
#: What rounding inputs otherwise does to the results of the original is no difference; this is its multiple.
CONDITION = 8.0


@dataclass(frozen=True)
class Tried:
    """What became of one module: how many pairs of runs were compared, and the error of a wrong one."""

    outcome: str
    calls: int = 0
    detail: str = ""
    error: float = 0.0


class _Apart(Exception):
    """Two runs differ by more than rounding; ``error`` is by how much."""

    def __init__(self, error: float, what: str) -> None:
        super().__init__(what)
        self.error = error


@dataclass(frozen=True)
class Case:
    """Arguments of one call by their places, the dtype of the parameters, and which arguments get no gradient."""

    arguments: tuple[Any, ...]
    held: torch.dtype
    keywords: tuple[tuple[str, Any], ...] = ()
    still: frozenset[int] = frozenset()


def tried(form: Form, source: str, draw: random.Random) -> Tried:
    """Patch a module made from a form, run both, and compare outputs and gradients."""
    from veomni_hook.patches.engine import Origin, patch_source

    try:
        patched = patch_source(source, [], Origin(MODULE, "generated.py", "transformers", "0"), idioms=True)
    except Exception as error:  # whatever a module says, patching it must not raise
        return Tried("patching fails", detail=f"{type(error).__name__}: {error}")
    if not patched.report.applied:
        return Tried("not routed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        came = _compared(form, source, patched.text, draw)
        if came.outcome == "wrong" and (came.error <= SMALL or form.kind == "SomeRouter"):
            others = [_compared(form, source, patched.text, random.Random(number)) for number in range(AGAIN)]
            if sum(one.outcome in FAILURES for one in others) < 2:
                return Tried("rounding", came.calls)
        return came


def _compared(form: Form, source: str, text: str, draw: random.Random) -> Tried:
    try:
        with _module(source) as original:
            expected = [(case, _expected(form, original, case)) for case in cases(form, draw)]
    except Exception as error:
        return Tried("broken", detail=f"{type(error).__name__}: {error}"[:200])
    fitting = [(case, found) for case, found in expected if not isinstance(found, str)]
    if not fitting:
        return Tried("broken", detail=str(expected[0][1])[:200])
    exact, taken, calls = True, 0, 0
    try:
        with _module(text) as patched:
            for (case, wanted), choice in itertools.product(fitting, CHOICES):
                found, took = _patched(form, patched, case, choice)
                taken, calls = taken + took, calls + 1
                exact &= _same(form, source, case, wanted, found)
    except _Apart as error:
        return Tried("wrong", calls, f"{choice}: {_said(case)}: {error}", error.error)
    except Exception as error:
        if "modified by an inplace operation" in str(error):
            return Tried("in place", calls)
        return Tried("guard fails", calls, f"{choice}: {_said(case)}: {type(error).__name__}: {error}")
    if not taken:
        return Tried("upstream's", calls)
    return Tried("equal" if exact else "rounding", calls)


def _said(case: Case) -> str:
    shapes = [
        f"{one.dtype}{list(one.shape)}" if isinstance(one, torch.Tensor) else repr(one)
        for one in case.arguments
    ]
    return f"{', '.join(shapes)} with parameters in {case.held}"


def _expected(form: Form, module: Any, case: Case) -> Run | str:
    try:
        return _called(build(form, module, case), form, case)
    except UNFIT as error:
        return f"{type(error).__name__}: {error}"


def _patched(form: Form, module: Any, case: Case, choice: str) -> tuple[Run, bool]:
    """Run a patched module under a choice of kernels; also whether any call went to a kernel."""
    from veomni_hook.kernels.slot import Slot

    took: list[bool] = []

    def call() -> Run:
        owner = build(form, module, case)
        found = _called(owner, form, case)
        slots = [one for one in vars(module).values() if isinstance(one, Slot)]
        outcomes = [slot.outcome(one) for slot in slots for one in owner.modules()]
        took.append(any(outcome is not None and outcome.backend == choice for outcome in outcomes))
        return found

    return with_kernels(choice, call), any(took)


def _called(owner: nn.Module, form: Form, case: Case) -> Run:
    """One call, with gradients for everything that is not to be still; of language models the logits, too."""
    outputs: list[Any] = []

    def call(**given: Any) -> Any:
        arguments = [given.get(f"argument {number}", value) for number, value in enumerate(case.arguments)]
        outputs.append(owner(*arguments, **dict(case.keywords)))
        return outputs[-1].loss if form.kind == "SomeForCausalLM" else outputs[-1]

    given = {f"argument {n}": value for n, value in enumerate(case.arguments) if n not in case.still}
    found = run(call, given, owner)
    if form.kind == "SomeForCausalLM":
        found["logits"] = (outputs[-1].logits * 1).detach()
    return found


def _same(form: Form, source: str, case: Case, wanted: Run, found: Run) -> bool:
    """Whether two runs are equal bit for bit; raises _Apart where they are not within rounding."""
    dtypes = {
        one.dtype for one in case.arguments if isinstance(one, torch.Tensor) and one.is_floating_point()
    }
    dtype = torch.bfloat16 if torch.bfloat16 in {*dtypes, case.held} else torch.float32
    try:
        return not agree(wanted, found, dtype=dtype)
    except Differs as differs:
        error = _error(wanted, found)
        if error > max(TOLERANCE[dtype], CONDITION * _condition(form, source, case, wanted, dtype)):
            raise _Apart(error, str(differs)) from differs
    return False


def _error(wanted: Run, found: Run) -> float:
    """The largest relative error; infinite where shapes, dtypes, or what is not finite, are others."""
    if wanted.keys() != found.keys():
        return float("inf")
    errors = [0.0]
    for name, want in wanted.items():
        have = found[name]
        if want.dtype is not have.dtype or want.shape != have.shape:
            return float("inf")
        want, have = want.double(), have.double()
        same = (want == have) | (want.isnan() & have.isnan())
        if same.all():
            continue
        scale = want.nan_to_num(0, 0, 0).abs().max().clamp(min=1e-6)
        error = ((want - have)[~same].abs().max() / scale).item()
        errors.append(error if error == error else float("inf"))
    return max(errors)


def _condition(form: Form, source: str, case: Case, wanted: Run, dtype: torch.dtype) -> float:
    """How much the original's results change when its inputs are rounded otherwise, a few times over."""
    found = 0.0
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)

        def moved(value: Any, generator: torch.Generator = generator) -> Any:
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                return value
            noise = torch.randn(value.shape, generator=generator) * torch.finfo(dtype).eps
            return (value.double() * (1 + noise.double())).to(value.dtype)

        other = replace(case, arguments=tuple(moved(one) for one in case.arguments))
        with _module(source) as module:
            result = _expected(form, module, other)
        if isinstance(result, str):
            return float("inf")
        for name in list(result):
            if name.endswith(" afterwards"):
                result[name] = wanted.get(name, result[name])
        error = _error(wanted, result)
        found = max(found, error if error != float("inf") else 0.0)
    return found


@contextmanager
def _module(text: str) -> Iterator[types.ModuleType]:
    """A module of this text under the name of a modeling module."""
    module = types.ModuleType(MODULE)
    module.__package__ = MODULE.rpartition(".")[0]
    before = sys.modules.get(MODULE)
    sys.modules[MODULE] = module
    try:
        exec_module(module, compile(text, "generated.py", "exec", dont_inherit=True))
        yield module
    finally:
        if before is None:
            del sys.modules[MODULE]
        else:
            sys.modules[MODULE] = before


#: Arguments of constructors, by the class.
_SIZES = {"SomeRMSNorm": (8,), "BankExperts": (4, 6, 5), "SomeForCausalLM": (8,)}  # fmt: skip


def build(form: Form, module: Any, case: Case) -> nn.Module:
    """The module that is called, with parameters that are the same each time."""
    torch.default_generator.manual_seed(7)
    owner: nn.Module = getattr(module, form.called)(*_SIZES.get(form.kind, ()))
    return owner.to(case.held)


def cases(form: Form, draw: random.Random) -> list[Case]:
    """Some calls of a form: dtypes of inputs and parameters, odd shapes, views."""
    makers: dict[str, Callable[[random.Random], Iterator[Case]]] = {
        "SomeRMSNorm": _norm_cases,
        "SomeMLP": lambda draw: _layer_cases(draw, 6),
        "SomeRouter": lambda draw: _layer_cases(draw, 6),
        "BankExperts": _expert_cases,
        "SomeMoE": _auxiliary_cases,
        "SomeForCausalLM": _model_cases,
        "SomeAttention": lambda draw: _rotary_cases(form, draw),
    }
    torch.default_generator.manual_seed(draw.randrange(2**31))
    return list(makers[form.kind](draw))


_MIXED = ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16))


def _views(draw: random.Random, width: int) -> Iterator[torch.Tensor]:
    """Tensors of odd shapes, one after another, some of them not contiguous."""
    shapes = [(2, 3, width), (1, width), (5, 1, width), (3, 7, width)]
    while True:
        shape = draw.choice(shapes)
        kind = draw.randrange(4)
        if kind == 0 and len(shape) == 3:
            yield torch.randn(shape[1], shape[0], width).transpose(0, 1)
        elif kind == 1:
            yield torch.randn(*shape[:-1], 2 * width)[..., ::2]
        else:
            yield torch.randn(shape) * draw.choice((0.1, 1.0, 4.0))


def _norm_cases(draw: random.Random) -> Iterator[Case]:
    views = _views(draw, 8)
    for held, dtype in _MIXED:
        x = next(views).to(dtype)
        yield Case((x,), held)
        yield Case((x, torch.randn(x.shape).to(dtype)), held)


def _layer_cases(draw: random.Random, width: int) -> Iterator[Case]:
    views = _views(draw, width)
    for dtype in (torch.float32, torch.bfloat16):
        yield Case((next(views).to(dtype),), dtype)


def _expert_cases(draw: random.Random) -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        tokens, top = draw.choice((1, 5, 8)), draw.choice((1, 2, 3))
        chosen = (
            torch.rand(tokens, 4).topk(top).indices
            if draw.random() < 0.7
            else torch.randint(0, 4, (tokens, top))
        )
        yield Case((torch.randn(tokens, 6).to(dtype), chosen, torch.rand(tokens, top).to(dtype)), dtype)


def _auxiliary_cases(draw: random.Random) -> Iterator[Case]:
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, draw.randrange(1, 7) :] = 0
    for dtype, given in ((torch.float32, None), (torch.float32, mask), (torch.bfloat16, mask)):
        layers = (torch.randn(14, 5).to(dtype), torch.randn(14, 5).to(dtype))
        yield Case((*layers, given) if given is not None else layers, dtype)


def _model_cases(draw: random.Random) -> Iterator[Case]:
    labels = torch.randint(0, 11, (2, 7))
    labels[0, : draw.randrange(4)] = -100
    for dtype in (torch.float32, torch.bfloat16):
        more = draw.choice(((), (("num_items_in_batch", torch.tensor(9)),), (("ignore_index", 3),)))
        yield Case((torch.randn(2, 7, 8).to(dtype), labels), dtype, more)


_TABLES = ("cos", "sin", "freqs_cis")


def _rotary_cases(form: Form, draw: random.Random) -> Iterator[Case]:
    """Of the layouts that the plain form takes, some."""
    fitting = _fitting(form.name)
    for dtype, table in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ):
        case = _rotary_case(form, draw.choice(fitting), dtype, table)
        # Tables need no gradient, as a rule, and some kernels give them none.
        tables = {n for n, name in enumerate(form.parameters[: len(case.arguments)]) if name in _TABLES}
        yield replace(case, still=frozenset(tables if draw.random() < 0.7 else ()))


@cache
def _fitting(name: str) -> list[int]:
    """The numbers of the layouts that the plain form of a name takes."""
    form = next(one for one in forms()["rotary"] if one.name == name)
    found = []
    with _module(form.source) as module:
        for number in range(len(list(layouts(list(form.parameters))))):
            case = _rotary_case(form, number, torch.float32, torch.float32)
            if not isinstance(_expected(form, module, case), str):
                found.append(number)
    assert found, f"{form.name} takes no inputs that are known"
    return found


def _rotary_case(form: Form, number: int, dtype: torch.dtype, table: torch.dtype) -> Case:
    inputs, options = list(layouts(list(form.parameters)))[number]
    typed = [
        value if not value.is_floating_point() else value.to(table if name in _TABLES else dtype)
        for name, value in inputs.items()
    ]
    return Case(tuple(typed), dtype, tuple(options.items()))
