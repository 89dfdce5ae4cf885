"""Outputs and gradients of two runs of one call, compared within the rounding of a dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

GRADIENT = "grad of "
AFTERWARDS = " afterwards"


class Differs(Exception):
    """The guarded path and the upstream body disagree."""


class Degenerate(Exception):
    """The comparison would hold for another formula as well: zeros, nothing finite, or no gradients."""


class Run(dict[str, torch.Tensor]):
    """Results by name: outputs and gradients."""

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients by what they are of."""
        return {name.removeprefix(GRADIENT): v for name, v in self.items() if name.startswith(GRADIENT)}

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """What the call returned."""
        return {k: v for k, v in self.items() if not k.startswith(GRADIENT) and not k.endswith(AFTERWARDS)}


def tensors(value: Any, prefix: str = "output") -> dict[str, torch.Tensor]:
    """Every tensor in a result, by its place."""
    if isinstance(value, torch.Tensor):
        return {prefix: value}
    if isinstance(value, dict):
        return {k: t for key, item in value.items() for k, t in tensors(item, f"{prefix}.{key}").items()}
    if isinstance(value, list | tuple):
        return {k: t for i, item in enumerate(value) for k, t in tensors(item, f"{prefix}[{i}]").items()}
    return {}


def run(call: Callable[..., Any], inputs: Mapping[str, Any], owner: nn.Module | None = None) -> Run:
    """Call with fresh leaves for ``inputs``, backpropagate a fixed cotangent, and collect everything."""
    if MODE.run is not None:
        return MODE.run(call, inputs, owner)
    inputs = MODE.placed(inputs, owner)
    leaves = {
        name: value.detach().clone().requires_grad_(MODE.is_leaf(name, value))
        for name, value in inputs.items()
        if isinstance(value, torch.Tensor)
    }
    if owner is not None:
        owner.zero_grad(set_to_none=True)
    # What a body draws at random, it draws in both runs.
    # (`torch.manual_seed` seeds accelerators, too, and takes a millisecond for it.)
    torch.default_generator.manual_seed(2)
    # No leaves: what a body changes in place is changed in both runs.
    given = {name: leaf.clone() for name, leaf in leaves.items()}
    result = Run(tensors(call(**{**inputs, **given})))
    # In sorted order: the two runs must draw the same cotangents.
    generator = torch.Generator().manual_seed(1)
    total: torch.Tensor | None = None
    for name in sorted(result):
        value = result[name]
        cotangent = torch.randn(value.shape, generator=generator).to(value.device, value.dtype)
        if value.requires_grad and value.is_floating_point():
            part = (value.float() * cotangent.float()).sum()
            total = part if total is None else total + part
    if total is not None:
        torch.autograd.backward(total)
    for name, leaf in leaves.items():
        if leaf.grad is not None:
            result[f"{GRADIENT}{name}"] = leaf.grad
    result |= {f"{name}{AFTERWARDS}": value for name, value in given.items()}
    for name, parameter in owner.named_parameters() if owner is not None else ():
        if parameter.grad is not None:
            result[f"{GRADIENT}self.{name}"] = parameter.grad.clone()
    return Run({name: value.detach().clone() for name, value in result.items()})


@dataclass
class Mode:
    """How sites are run.

    Attributes:
        kernels: what the guards run.
        run: what runs a call in place of `run`, if not None.
        slack: how many times the rounding runs may be apart.
        dtypes: of the inputs.
        device: where calls run.
    """

    kernels: str = "reference"
    run: Callable[..., Run] | None = None
    slack: float = 1.0
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    device: str = "cpu"

    def placed(self, inputs: Mapping[str, Any], owner: nn.Module | None) -> dict[str, Any]:
        """Move a module to the device, and return the inputs there."""
        if owner is not None:
            owner.to(self.device)
        moved: dict[str, Any] = tree_map_only(torch.Tensor, lambda x: x.to(self.device), dict(inputs))
        return moved

    def mixed(self) -> Iterator[tuple[torch.dtype, torch.dtype]]:
        """Dtypes of parameters and inputs."""
        yield from ((dtype, dtype) for dtype in self.dtypes)
        yield from ((self.dtypes[0], dtype) for dtype in self.dtypes[1:])

    def is_leaf(self, name: str, value: Any) -> bool:
        """Whether an input gets a gradient. Tables get none in models, and kernels refuse them with one."""
        differentiable = isinstance(value, torch.Tensor) and value.is_floating_point()
        return differentiable and (self.kernels == "reference" or name not in TABLES)


#: Inputs that are tables of positions.
TABLES = ("cos", "sin")


MODE = Mode()
#: Says that torch cannot compute something of a call.
RAISES = " raises "
#: Relative to the largest value of a tensor: a few roundings of the dtype, since sums are ordered differently.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float64: 1e-12}


def agree(
    expected: Run, found: Run, *, exact: bool = False, dtype: torch.dtype = torch.float32
) -> dict[str, float]:
    """Compare two runs; return the relative errors of tensors that are not equal bit for bit.

    Raises:
        Differs: a tensor is missing, has another dtype or shape, or differs beyond rounding (at all, if ``exact``).
    """
    # What torch cannot compute of upstream's code is not compared.
    beyond = tuple(name.partition(RAISES)[0] for name in expected if RAISES in name)
    if beyond:
        expected, found = (
            Run({k: v for k, v in each.items() if not k.startswith(beyond) and not k.endswith(beyond)})
            for each in (expected, found)
        )
    if expected.keys() != found.keys():
        raise Differs(f"results differ: {sorted(expected.keys() ^ found.keys())}")
    if not expected:
        raise Differs("nothing to compare")
    errors = {}
    for name, want in expected.items():
        have = found[name]
        if want.dtype is not have.dtype or want.shape != have.shape:
            raise Differs(f"{name}: {want.dtype}{list(want.shape)} against {have.dtype}{list(have.shape)}")
        same = (want == have) | (want.isnan() & have.isnan())
        if same.all():
            continue
        # What is NaN or infinite in one has to be the same in the other.
        scale = want.float().nan_to_num(0, 0, 0).abs().max().clamp(min=1e-6)
        error = ((want.float() - have.float())[~same].abs().max() / scale).item()
        allowed = (
            0.0
            if exact and MODE.kernels == "reference"
            else MODE.slack * max(ROUNDING[dtype], ROUNDING.get(want.dtype, 0.0))
        )
        if not error <= allowed:
            raise Differs(f"{name}: relative error {error:.2e}, allowed {allowed:.1e}")
        errors[name] = error
    return errors


def meaningful(expected: Run, needed: Iterable[str]) -> None:
    """Check that upstream's run says something: values that vary, and gradients of what is ``needed``.

    Raises:
        Degenerate: it does not.
    """
    floating = {name: value for name, value in expected.outputs.items() if value.is_floating_point()}
    if not floating:
        raise Degenerate("no output has values")
    gradients = expected.gradients
    for name in needed:
        if name not in gradients:
            raise Degenerate(f"there is no gradient of {name}, only of {sorted(gradients)}")
        floating[f"{GRADIENT}{name}"] = gradients[name]
    for name, value in floating.items():
        if value.isnan().any():
            raise Degenerate(f"{name} has NaN")
        if not (value.isfinite() & (value != 0)).any():
            raise Degenerate(f"{name} {list(value.shape)} has nothing but zeros and infinities")
