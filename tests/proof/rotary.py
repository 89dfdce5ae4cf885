"""The prover of rotary functions: called as bound call sites call them, in every layout that they take."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from tests.proof.compare import MODE, run
from tests.proof.inputs import Inputs, packed_rotary_calls
from tests.proof.provers import UNFIT, Proof, Tally, Unreached, class_prover, slots_of
from veomni_hook.kernels.selection.registry import registry

BATCH, HEADS, LENGTH, WIDTH = 2, 3, 5, 16


def prove_rotary(site: Any, module: Any) -> Proof:
    """Prove a rotary function through ``slot.at``, or a method through its guard."""
    if "." in site.target:
        return class_prover(packed_rotary_calls)(site, module)
    upstream = getattr(module, site.target)
    wanted = set(site.variant.split("|"))
    slots = [slot for slot in slots_of(module, "rotary") if slot.variant in wanted]
    if not slots:
        if "nothing calls" in site.reason:
            return _uncalled(site, upstream)
        raise Unreached("the module has no slot for it")
    names = list(inspect.signature(inspect.unwrap(upstream)).parameters)
    tally = Tally(site.variant)
    for slot, dtype in itertools.product(slots, MODE.dtypes):
        owner = nn.Module()
        for table_dtype, (inputs, options) in itertools.product(
            dict.fromkeys((dtype, torch.float32)), layouts(names)
        ):
            given = {name: _typed(name, v, dtype, table_dtype) for name, v in inputs.items()}
            call = partial(_through, slot, owner, upstream, options)
            tally.compare([slot], owner, call, given, dtype, [_rotated(given)])
    return tally.proof()


def _rotated(inputs: Inputs) -> str:
    """The first operand that is neither a table nor a position."""
    return next(n for n in inputs if n not in ("cos", "sin", "freqs_cis") and "position" not in n)


def _through(slot: Any, owner: nn.Module, upstream: Any, options: dict[str, Any], **given: Any) -> Any:
    return slot.at(owner, upstream)(**given, **options)


def _typed(name: str, value: torch.Tensor, dtype: torch.dtype, table: torch.dtype) -> torch.Tensor:
    if not value.is_floating_point():
        return value
    return value.to(table if name in ("cos", "sin") else dtype)


def layouts(names: list[str]) -> Iterator[tuple[Inputs, dict[str, Any]]]:
    """Operands in the layouts that models use, by the names of the parameters."""
    shapes = (
        ((BATCH, HEADS, LENGTH, WIDTH), (BATCH, LENGTH), 1),
        ((BATCH, LENGTH, HEADS, WIDTH), (BATCH, LENGTH), 2),
        ((LENGTH, HEADS, WIDTH), (LENGTH,), None),
        ((BATCH, HEADS, LENGTH, WIDTH), (LENGTH,), None),
        ((BATCH, LENGTH, WIDTH), (BATCH, LENGTH), None),
    )
    for (shape, table, dim), part in itertools.product(shapes, (WIDTH, WIDTH // 2)):
        inputs: Inputs = {}
        options: dict[str, Any] = {}
        # The same numbers in any order of parameters: tables first, whatever the others are called.
        for name in sorted(names, key=lambda name: (name not in ("cos", "sin"), name)):
            if "cos" in name or ("sin" in name and "sinusoidal" not in name):
                inputs[name] = torch.randn(*table, part)
            elif "freqs" in name:
                angles = torch.rand(*(table if len(table) == 2 else (BATCH, LENGTH)), WIDTH // 2)
                inputs[name] = torch.polar(torch.ones_like(angles), angles)
            elif name == "position_ids" and ("value" in names or "v" in names):
                inputs[name] = torch.arange(LENGTH).repeat(BATCH, 1)
            elif name in ("unsqueeze_dim",):
                if dim is not None:
                    options[name] = dim
            elif "position" in name or "dtype" in name or name in ("self",):
                continue
            else:
                inputs[name] = torch.randn(shape)
        yield {name: inputs[name] for name in names if name in inputs}, options


def _uncalled(site: Any, upstream: Any) -> Proof:
    """A function that nothing calls has no guard; its formula is proved against the reference alone."""
    reference = registry.ops()["rotary"].variants[site.variant].reference
    home, attribute = reference.split(":")
    formula = getattr(import_module(home), attribute)
    names = list(inspect.signature(inspect.unwrap(upstream)).parameters)
    operands = list(inspect.signature(formula).parameters)
    tally = Tally(site.variant)
    for dtype, (inputs, options) in itertools.product(MODE.dtypes, layouts(names)):
        given = {name: _typed(name, v, dtype, dtype) for name, v in inputs.items()}
        renamed = {site.captures.get(operand, operand): operand for operand in operands}
        try:
            expected = run(partial(upstream, **options), given)
        except UNFIT as error:
            tally.note(f"{type(error).__name__}: {str(error)[:80]}")
            continue

        def call(renamed: dict[str, str] = renamed, options: Any = options, **values: Any) -> Any:
            return formula(**{renamed[name]: value for name, value in values.items()}, **options)

        tally.add(expected, run(call, given), {site.variant}, dtype, [_rotated(given)])
    return tally.proof()
