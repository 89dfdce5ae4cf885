"""Runs two implementations on the same inputs and compares outputs and every gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Largest difference, relative to the largest expected value, that rounding in another order explains.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def gradients(
    function: Callable[..., object], inputs: Sequence[torch.Tensor], wanted: Sequence[bool]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Return the outputs of ``function`` and the gradients of fresh copies of ``inputs`` (None: not ``wanted``).

    Copies keep the strides of the inputs. The same gradients flow into the outputs at every call. What is
    saved for backward is given out once in a backward pass, as by a checkpoint.
    """
    leaves = [_copy(tensor).requires_grad_(want) for tensor, want in zip(inputs, wanted, strict=True)]
    before = [leaf.detach().clone() for leaf in leaves]
    with torch.autograd.graph.saved_tensors_hooks(_Saved, _Saved.taken):
        outputs = function(*leaves)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    generator = torch.Generator().manual_seed(7)
    incoming = [torch.randn(out.shape, generator=generator).to(out) for out in outputs]
    differentiable = [(out, grad) for out, grad in zip(outputs, incoming, strict=True) if out.requires_grad]
    if differentiable:
        torch.autograd.backward(*zip(*differentiable, strict=True))
    for leaf, held in zip(leaves, before, strict=True):
        assert torch.equal(leaf.detach(), held), "an input was changed"
    return [out.detach() for out in outputs], [leaf.grad for leaf in leaves]


def assert_matches(
    ours: Callable[..., object],
    upstream: Callable[..., object],
    inputs: Sequence[torch.Tensor],
    wanted: Sequence[bool] | None = None,
    *,
    exact: bool = False,
    tolerance: float | None = None,
) -> None:
    """Compare outputs and gradients: dtypes and shapes equal, values within rounding (or equal bits)."""
    wanted = wanted or [tensor.is_floating_point() for tensor in inputs]
    got, got_grads = gradients(ours, inputs, wanted)
    expected, expected_grads = gradients(upstream, inputs, wanted)
    assert len(got) == len(expected)
    for found, truth in zip([*got, *got_grads], [*expected, *expected_grads], strict=True):
        if truth is None or found is None:
            assert found is None and truth is None
            continue
        assert (found.dtype, found.shape) == (truth.dtype, truth.shape)
        if exact:
            assert torch.equal(found, truth)
        elif truth.numel():
            low = min((t.dtype for t in inputs if t.is_floating_point()), key=lambda d: torch.finfo(d).bits)
            usual = max(TOLERANCE[truth.dtype], TOLERANCE[low]) * (4 if truth.is_cuda else 1)
            close(found, truth, tolerance or usual)


def close(found: Any, truth: Any, tolerance: float) -> None:
    """Assert that the largest difference is within ``tolerance`` of the largest true value.

    Of tensors, or of equally many in sequences, or in mappings with the same keys, one by one.
    """
    if isinstance(truth, Mapping):
        assert found.keys() == truth.keys()
        for name, each in truth.items():
            _close(found[name], each, tolerance, f"{name}: ")
    elif isinstance(truth, torch.Tensor):
        _close(found, truth, tolerance)
    else:
        for one, other in zip(found, truth, strict=True):
            close(one, other, tolerance)


def _close(found: torch.Tensor, truth: torch.Tensor, tolerance: float, name: str = "") -> None:
    found, truth = found.double(), truth.double()
    assert torch.equal(found.isnan(), truth.isnan()), name
    found, truth = found.nan_to_num(), truth.nan_to_num()
    error, most = (found - truth).abs().max().item(), truth.abs().max().item()
    assert error <= tolerance * max(most, 1e-12), f"{name}{error} of {most}"


def grads_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The gradients of the parameters that have one, by name."""
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def results(
    module: torch.nn.Module, x: torch.Tensor, run: Callable[..., torch.Tensor] = lambda module, x: module(x)
) -> list[torch.Tensor]:
    """The output of a module, and every gradient that is wanted of a step with it."""
    x = x.clone().requires_grad_()
    y = run(module, x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(each.grad for each in module.parameters() if each.requires_grad)]


class _Saved:
    """A tensor that is saved for backward, and the backward pass that has read it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._reader: int | None = None

    def taken(self) -> torch.Tensor:
        reader = torch._C._current_graph_task_id()
        assert reader != self._reader, "backward reads ctx.saved_tensors twice, which a checkpoint refuses"
        self._reader = reader
        return self._tensor


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if 0 in tensor.stride():  # expanded: there is no place for each value
        return tensor.detach()
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)
