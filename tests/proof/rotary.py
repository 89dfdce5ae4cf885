"""The prover of rotary functions: called as a bound call site calls them, in every layout that they take."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.proof.build import Unbuildable
from tests.proof.call_sites import prove_call_site
from tests.proof.compare import Differs, agree
from tests.proof.provers import DTYPES, Inputs, both, slots_of

__all__ = ["prove_rotary"]

BATCH, HEADS, LENGTH, WIDTH = 2, 3, 5, 16


def prove_rotary(site: Any, module: Any) -> str:
    """Prove a module-level rotary function through ``slot.at``, a call site by its text."""
    if not site.counted:
        return prove_call_site(site, module)
    upstream = getattr(module, site.target)
    wanted = set(site.variant.split("|"))
    slots = [slot for slot in slots_of(module, "rotary") if slot.variant in wanted]
    if not slots:
        if "nothing calls" in site.reason:
            return _uncalled(site, upstream)
        raise Unbuildable("the module has no slot for it")
    names = list(inspect.signature(inspect.unwrap(upstream)).parameters)
    bitwise, notes = True, []
    reached: set[tuple[str, torch.dtype]] = set()
    for slot, dtype in itertools.product(slots, DTYPES):
        for table_dtype in dict.fromkeys((dtype, torch.float32)):
            for inputs, options in layouts(names):
                typed = {name: _typed(name, v, dtype, table_dtype) for name, v in inputs.items()}
                owner = nn.Module()
                call = partial(_through, slot, owner, upstream, options)
                try:
                    expected, found, taken, refused = both(module, "rotary", owner, call, typed)
                except (TypeError, RuntimeError, IndexError, ValueError, AttributeError) as error:
                    notes.append(f"{type(error).__name__}: {str(error)[:80]}")
                    continue
                notes += refused
                if slot.variant in taken:
                    bitwise &= agree(expected, found, dtype=dtype)
                    reached.add((slot.variant, dtype))
    missing = [f"{v}@{d}" for v in wanted for d in DTYPES if (v, d) not in reached]
    if missing:
        raise Unbuildable(f"no call reached {missing}: {'; '.join(dict.fromkeys(notes))}"[:500])
    return "equal" if bitwise else "rounding"


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
        for name in names:
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
        yield inputs, options


def _uncalled(site: Any, upstream: Any) -> str:
    """A function that nothing calls has no guard; its formula is proved against the reference alone."""
    from importlib import import_module

    from veomni_hook.kernels.registry import registry

    reference = registry.ops()["rotary"].variants[site.variant].reference
    home, attribute = reference.split(":")
    formula = getattr(import_module(home), attribute)
    names = list(inspect.signature(inspect.unwrap(upstream)).parameters)
    operands = list(inspect.signature(formula).parameters)
    done = 0
    for inputs, options in layouts(names):
        try:
            expected = upstream(**inputs, **options)
        except (TypeError, RuntimeError, IndexError, ValueError):
            continue
        given = {**dict(zip(operands, inputs.values(), strict=False)), **options}
        found = formula(**given)
        pairs = zip(expected, found, strict=True) if isinstance(expected, tuple) else [(expected, found)]
        if not all(torch.equal(a, b) for a, b in pairs):
            raise Differs("the function and the reference")
        done += 1
    if not done:
        raise Unbuildable("no layout fits")
    return "equal"
