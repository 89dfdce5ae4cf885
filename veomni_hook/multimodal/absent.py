"""Calls the tower of images, videos or sounds for a batch that has none, where other processes wait for it.

Where processes share a tower's parameters, its call gathers them and its backward pass reduces gradients: if
one process does not call it, the others wait for ever, in evaluation as well; so all call it equally often.
With DistributedDataParallel its gradients are missing, and one call is enough. There the tower is called with
the smallest input, and the embeddings get zero times its result. Elsewhere nothing happens: in one process,
in steps of decoding, which have no images in any process, and where the hook is deactivated. It is no kernel:
a choice of kernels does not switch it off.

The optimizer sees gradients of zero, where upstream has none: weight decay and momentum change the tower.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from veomni_hook.errors import ParallelError, VeomniHookWarning
from veomni_hook.kernels.selection.process_choice import STATE
from veomni_hook.kernels.shared.changed import changed
from veomni_hook.kernels.shared.sharded import is_sharded
from veomni_hook.multimodal.batches import tensors_in
from veomni_hook.multimodal.placeholders import Underivable, placeholders
from veomni_hook.printable import printable
from veomni_hook.settings import resolve

__all__ = ["plus_zero"]

logger = logging.getLogger("veomni_hook.multimodal")
#: The modules that were called inside of a DistributedDataParallel which waits for every gradient. A
#: checkpoint calls them again outside of it.
_WAITED_FOR: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_said: set[tuple[type, tuple[str, ...]]] = set()


def plus_zero(  # noqa: PLR0913 - what the place in the code says, by keyword
    module: nn.Module,
    inputs_embeds: torch.Tensor,
    call: Callable[..., object],
    *,
    data: tuple[str, ...],
    towers: tuple[str, ...],
    outputs: tuple[str, ...],
    layout: str = "",
    elsewhere: tuple[bool, ...] = (),
) -> torch.Tensor:
    """Return ``inputs_embeds``; where other processes wait for the tower, plus zero times its result.

    Random states and the statistics of batch normalisation are as before. The sum does not change if the
    result is infinite or NaN.

    Args:
        module: the module whose forward runs.
        inputs_embeds: ``[batch, positions, width]``.
        call: calls the method that computes features, with one argument for each name in ``data``.
        data: the names of its arguments that hold data.
        towers: the attributes of ``module`` that the method uses.
        outputs: the attributes of the result that upstream uses; empty: the result itself.
        layout: ``groups``: images come in groups; ``flat``: patches are vectors; empty: as the tower's first
            layer takes them.
        elsewhere: whether other places call the towers in this forward, with data or without. Then
            DistributedDataParallel waits for nothing, and may refuse a second call.

    Raises:
        ParallelError: in strict mode, if the smallest input is not known. Otherwise that is a warning, once
            for each class.
    """
    decoding = not module.training and inputs_embeds.shape[1] == 1
    if decoding or not (STATE.active and distributed.is_available()):
        return inputs_embeds
    if not (distributed.is_initialized() and distributed.get_world_size() > 1):
        return inputs_embeds
    added: torch.Tensor = _plus_zero(
        module, inputs_embeds, call, data, towers, outputs, layout, any(elsewhere)
    )
    return added


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _plus_zero(  # noqa: PLR0913, PLR0917 - what `plus_zero` takes
    module: nn.Module,
    inputs_embeds: torch.Tensor,
    call: Callable[..., object],
    data: tuple[str, ...],
    towers: tuple[str, ...],
    outputs: tuple[str, ...],
    layout: str,
    elsewhere: bool,  # noqa: FBT001
) -> torch.Tensor:
    used = [part for name in towers if isinstance(part := getattr(module, name, None), nn.Module)]
    why = _why(module, used, elsewhere=elsewhere)
    if not why:
        return inputs_embeds
    weights = (parameter for tower in used for parameter in tower.parameters())
    dtypes = (weight.dtype for weight in weights if weight.is_floating_point())
    dtype = next(dtypes, inputs_embeds.dtype)
    try:
        arguments = placeholders(
            data,
            used,
            config=getattr(module, "config", None),
            layout=layout,
            dtype=dtype,
            device=inputs_embeds.device,
        )
    except Underivable as reason:
        _warn(module, data, str(reason))
        return inputs_embeds
    _say(module, data, why)
    with ExitStack() as kept:
        kept.enter_context(_random_states(inputs_embeds.device))
        for norm in {part for tower in used for part in tower.modules() if isinstance(part, _NormBase)}:
            # It changes copies: the buffers' own values may be needed in backward.
            copies = {name: buffer.clone() for name, buffer in norm._buffers.items() if buffer is not None}
            kept.enter_context(changed(norm._buffers, copies))
        try:
            result = call(*arguments)
        except Exception as error:
            error.add_note(f"The batch has no {data[0]}, so the tower was called with zeros. {_fix(data)}")
            raise
    for value in tensors_in([getattr(result, name) for name in outputs] if outputs else result):
        if value.is_floating_point():
            zero = torch.nan_to_num(value, nan=0.0, posinf=0.0, neginf=0.0).mul(0).sum()
            inputs_embeds = inputs_embeds + zero.to(inputs_embeds.device, inputs_embeds.dtype)
    return inputs_embeds


def _why(module: nn.Module, towers: Sequence[nn.Module], *, elsewhere: bool) -> str:
    """Why other processes wait for the towers; empty if they do not, or if another place's call is enough."""
    # Without gradients, too: a reentrant checkpoint runs the first pass so, and the second with gradients.
    if is_sharded(towers):
        return "its parameters are sharded"
    if not module.training:
        return ""
    active = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    if active is not None and not active.find_unused_parameters and module not in _WAITED_FOR:
        if any(submodule is module for submodule in active.modules()):
            _WAITED_FOR.add(module)
    trained = any(parameter.requires_grad for tower in towers for parameter in tower.parameters())
    if not elsewhere and module in _WAITED_FOR and trained and torch.is_grad_enabled():
        return "DistributedDataParallel waits for its gradients"
    return ""


def _random_states(device: torch.device) -> Any:
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    index = device.index if device.index is not None else torch.accelerator.current_device_index()
    return torch.random.fork_rng(devices=[index], device_type=device.type)


def _say(module: nn.Module, data: tuple[str, ...], why: str) -> None:
    if (type(module), data) not in _said:
        _said.add((type(module), data))
        logger.info(
            "%s: batches without %s call the tower with zeros: %s",
            printable(type(module).__name__),
            data[0],
            why,
        )


def _warn(module: nn.Module, data: tuple[str, ...], reason: str) -> None:
    name = type(module).__name__
    what = f"{name} cannot call its tower for a batch without {data[0]}: {reason}"
    if resolve().settings.strict:
        raise ParallelError(what, where=f"{name}.forward", fix=_fix(data))
    if (type(module), data) not in _said:
        _said.add((type(module), data))
        warnings.warn(
            f"{what}. Processes whose batches have some wait for ever. {_fix(data)}",
            VeomniHookWarning,
            stacklevel=5,
        )


def _fix(data: tuple[str, ...]) -> str:
    return f"Give every process {data[0]} in every batch, or freeze the tower and do not shard it"
