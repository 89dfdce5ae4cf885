"""The samples of a model call that share rows: found once, in front of the loop over layers.

Layers get them as ``cu_seq_lens_q``, upstream's own argument.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from veomni_hook.errors import SamplesError
from veomni_hook.kernels.gated_delta_rule.attention_masks import (
    Given,
    attends,
    check,
    is_of_padding,
    positions_of_text,
)
from veomni_hook.kernels.selection.process_choice import STATE
from veomni_hook.kernels.shared.handed import forget, hand
from veomni_hook.kernels.shared.host_values import host_copy, traced
from veomni_hook.kernels.shared.hub_functions import is_upstreams, running, takes
from veomni_hook.kernels.shared.origin import name_of
from veomni_hook.kernels.shared.samples import boundaries, of_rows
from veomni_hook.kernels.shared.separation import given_in, given_of, inseparable, layer_of

__all__ = ["found", "makes_cache", "refuse"]

Functions: TypeAlias = "tuple[tuple[str, str, str], ...]"
Layers: TypeAlias = "tuple[tuple[type, Functions], ...]"

#: Positions of a row that samples can share.
_FEWEST = 2


def found(
    owner: Any,
    kwargs: dict[str, object],
    position_ids: object,
    attention_mask: object,
    cache: object,
    inputs: Any,
    use_cache: object,
    masks_positions: bool = True,
    pools: bool = False,
) -> dict[str, Any]:
    """Return the arguments that a model hands to its layers, with the boundaries of samples that share rows.

    Boundaries in ``kwargs`` (``cu_seq_lens_q``, ``seq_idx``) stay as they are. Else a sample begins where
    ``position_ids`` do not count on, as for transformers' masks of packed sequences. They are read once a
    call, so the host waits for the device. Positions that a 2D ``attention_mask`` leaves out begin no sample.
    A call that continues a cache has no boundaries. Compiled code cannot read values, so there an assertion
    on the device fails if samples share a row.

    Args:
        owner: the model.
        kwargs: the arguments without a name in its forward; not changed.
        position_ids: ``[rows or 1, positions]``, or ``[3 or 4, rows, positions]``, or None.
        attention_mask: ``[rows, positions]``, a dictionary with one, or anything else, which is not read.
        cache: the cache, or None.
        inputs: ids or embeddings, ``[rows, positions, ...]``, or None.
        use_cache: whether the model makes a cache; None: as its config says.
        masks_positions: whether the model has masks made of positions for its attention.
        pools: whether layers pool windows of positions, which those of a cache would join.

    Raises:
        SamplesError: samples share a row, and the attention layers of the model would mix them.
    """
    arguments = Given(position_ids, attention_mask, cache, use_cache, masks_positions)
    if not traced():
        forget(owner)
    handed = _with_boundaries(owner, kwargs, arguments, inputs, reads_continued=pools)
    if not STATE.active or inputs is None or not given_in(handed) or _continues(cache):
        if pools and handed is not kwargs:
            raise inseparable("", type(owner).__name__, "they continue a cache", "pass no cache")
        return handed
    if traced():
        if attends(owner):
            _check_eagerly(owner, handed, arguments, inputs)
        return handed
    return hand(owner, handed) if _check(owner, handed, arguments, inputs) else handed


def makes_cache(kwargs: Mapping[str, object], position_ids: object) -> bool:
    """Return whether a model may make a cache that its call does not ask for.

    Beside a cache, transformers makes no masks of positions, so none is made where these have to keep samples
    apart.

    Args:
        kwargs: what `found` returned.
        position_ids: see there.
    """
    return not (STATE.active and position_ids is not None and given_in(kwargs))


def _with_boundaries(
    owner: object,
    kwargs: dict[str, object],
    given: Given,
    inputs: torch.Tensor,
    *,
    reads_continued: bool = False,
) -> dict[str, object]:
    """Return ``kwargs``, with boundaries if samples share a row."""
    position_ids = given.position_ids
    known = not STATE.active or inputs is None or inputs.shape[1] < _FEWEST or given_in(kwargs)
    if known or not isinstance(position_ids, torch.Tensor) or position_ids.dim() not in (2, 3):
        return kwargs
    mask = _mask(given.attention_mask)
    if traced():
        # An exported program has to run wherever its operators do.
        if given.cache is None and not getattr(torch.compiler, "_is_exporting_flag", False):
            _assert_one_sample_a_row(position_ids, mask, owner)
        return kwargs
    if _continues(given.cache) and not reads_continued:
        return kwargs
    rows, positions = inputs.shape[:2]
    begins = _begins(host_copy(position_ids)).expand(rows, positions)
    if mask is not None and bool(begins.any()):
        begins = _attended(begins, host_copy(position_ids), host_copy(mask))
    starts = begins.flatten().nonzero().flatten().tolist()
    if not starts:
        return kwargs
    ends = sorted({*starts, *range(0, rows * positions + 1, positions)})
    return {**kwargs, "cu_seq_lens_q": boundaries(ends, inputs.device)}


def _check(owner: object, kwargs: dict[str, object], arguments: Given, inputs: torch.Tensor) -> bool:
    """Return whether samples share a row; raise SamplesError if attention layers would mix them."""
    bounds = of_rows(inputs.shape[0], inputs.shape[1], *given_of(kwargs))
    if bounds is not None:
        check(owner, kwargs, arguments, bounds, inputs.shape[0])
    return bounds is not None


_check_eagerly: Callable[..., bool] = torch.compiler.disable(_check)  # type: ignore[no-untyped-call]


def refuse(
    owner: Any,
    kwargs: dict[str, Any],
    position_ids: object,
    attention_mask: object,
    cache: object,
    inputs: Any,
    use_cache: object,
    layers: Layers,
) -> None:
    """Raise SamplesError if samples share a row and a layer of the model would mix them.

    Boundaries are those of `found`. Where ``kwargs`` have them already, layers that packages compute may keep
    the samples apart.

    Args:
        owner: the model.
        kwargs: as for `found`, and so are all others but the last.
        position_ids: see there.
        attention_mask: see there.
        cache: see there.
        inputs: see there.
        use_cache: see there.
        layers: classes that mix positions. With each, what keeps samples apart without a kernel of ours: the
            functions that it calls, by name (``self.`` in front of an attribute of the layer), the argument
            of the model, and the parameter of the function. Empty: nothing does.
    """
    if not STATE.active or _continues(cache):
        return
    arguments = Given(position_ids, attention_mask, cache, use_cache)
    handed = _with_boundaries(owner, kwargs, arguments, inputs)
    if inputs is not None and given_in(handed):
        # Boundaries are values, which compiled code does not have.
        (_refuse_eagerly if traced() else _refuse)(owner, kwargs, handed, arguments, inputs, layers)


def _refuse(
    owner: Any,
    kwargs: dict[str, object],
    handed: dict[str, object],
    call_arguments: Given,
    inputs: torch.Tensor,
    layers: Layers,
) -> None:
    if (bounds := of_rows(inputs.shape[0], inputs.shape[1], *given_of(handed))) is None:
        return
    for layer in owner.modules():
        for kind, functions in layers:
            if isinstance(layer, kind) and (why := _mixes(layer, kind, functions, kwargs)):
                arguments = " and ".join(dict.fromkeys(argument for _, argument, _ in functions))
                besides = f", or {arguments} with packages that take boundaries" if arguments else ""
                raise SamplesError(
                    f"samples share a row, and nothing keeps them apart: {why}",
                    where=layer_of(layer),
                    fix=f"pass one sample a row{besides}",
                )
    check(owner, kwargs, call_arguments, bounds, inputs.shape[0])


_refuse_eagerly: Callable[..., None] = torch.compiler.disable(_refuse)  # type: ignore[no-untyped-call]


def _mixes(layer: object, kind: type, functions: Functions, kwargs: dict[str, object]) -> str:
    """Return why a layer mixes samples, or an empty string."""
    if not functions:
        return "the code of this layer has no boundaries of samples"
    for name, argument, parameter in functions:
        home = layer if name.startswith("self.") else sys.modules[kind.__module__]
        function = getattr(home, name.removeprefix("self."), None)
        runs = None if function is None else running(function)
        if runs is None or is_upstreams(runs, layer):
            return f"{name} is upstream's own code, which has no boundaries"
        if not takes(runs, parameter):
            return f"{name_of(runs)} takes no {parameter}"
        if kwargs.get(argument) is None:
            return f"{name_of(runs)} needs {argument}, which was not passed"
    return ""


def _continues(cache: object) -> bool:
    """Return whether a cache holds positions. Caches of old releases that cannot say so hold none."""
    for layer in getattr(cache, "layers", None) or (cache,):
        states = getattr(layer, "has_previous_state", False)
        if any(states.values()) if isinstance(states, dict) else states is True:
            return True
        # All layers with attention hold as many positions, and a static one asks the device.
        if (length := getattr(layer, "get_seq_length", None)) is not None:
            return int(length()) > 0
    return False


def _mask(attention_mask: object) -> torch.Tensor | None:
    """Return the mask of positions among what a model is given."""
    masks = attention_mask.values() if isinstance(attention_mask, dict) else (attention_mask,)
    return next(filter(is_of_padding, masks), None)


def _begins(position_ids: torch.Tensor) -> torch.Tensor:
    """Return ``[rows or 1, positions]``: whether a position begins another sample than the one before it."""
    text = positions_of_text(position_ids)
    if text is None:
        # All three are 0 only at a sample's first position.
        begins = (position_ids == 0).all(0)
        # Positions of text in transformers 5.2 may count from a number below 0: that of the last images.
        begins[:, 1:] &= ~(position_ids[:, :, :-1] == -1).all(0)
        begins[:, 1:] |= position_ids[0].diff(dim=-1) < 0
    else:
        begins = torch.zeros_like(text, dtype=torch.bool)
        begins[:, 1:] = text.diff(dim=-1) != 1
    begins[:, 0] = False
    return begins


def _attended(begins: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return which of these positions begin a sample among those that the mask keeps.

    Padding may stand within a sample, so one that counts on from the last position that is kept begins none.
    """
    kept = mask[:, -begins.shape[1] :] != 0
    begins = begins & kept & (kept.cumsum(1) > 1)
    line = (position_ids if position_ids.dim() == 2 else position_ids[0]).expand_as(kept)
    places = torch.arange(kept.shape[1], device=kept.device)
    last = torch.where(kept, places, 0).cummax(1).values
    steps = line[:, 1:] - line.gather(1, last)[:, :-1]
    # Without positions of text, those of time stand still within an image.
    begins[:, 1:] &= steps <= 0 if positions_of_text(position_ids) is None else steps != 1
    return begins


def _assert_one_sample_a_row(position_ids: torch.Tensor, mask: torch.Tensor | None, owner: object) -> None:
    begins = _begins(position_ids)
    if mask is not None:
        begins = _attended(begins, position_ids, mask)
    torch._assert_async(
        ~begins.any(),
        f"position_ids show samples that share a row, which compiled code of {type(owner).__name__} cannot"
        " keep apart: pass cu_seq_lens_q or seq_idx as well",
    )
