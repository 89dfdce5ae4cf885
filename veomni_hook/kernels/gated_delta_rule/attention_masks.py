"""Whether the attention layers of a model keep samples apart that share a row.

Boundaries are for layers of linear attention. Attention beside them reads transformers' masks, which separate
samples by ``position_ids`` alone, without a cache and without another mask; or flash attention, which takes
lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from veomni_hook.errors import SamplesError
from veomni_hook.kernels.shared.host_values import host_copy
from veomni_hook.kernels.shared.samples import ends_of

__all__ = ["Given", "attends", "check", "is_of_padding", "positions_of_text"]

#: Implementations that get transformers' masks.
_MASKED = ("eager", "sdpa", "flex_attention")
#: Arguments with which transformers hands lengths to flash attention: all of them, or none.
_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
#: Rows of positions for text, time, height and width.
_WITH_TEXT = 4


@dataclass(frozen=True)
class Given:
    """What a model was given that decides about the masks of its attention.

    Attributes:
        position_ids: ``[rows or 1, positions]``, ``[3 or 4, rows, positions]``, or None.
        attention_mask: ``[rows, positions]``, a mask for attention as it is, a dictionary of masks, or None.
        cache: the cache, or None.
        use_cache: whether the model makes a cache; None: as its config says.
        masks_positions: whether the model has masks made of positions for its attention.
    """

    position_ids: Any
    attention_mask: Any
    cache: Any
    use_cache: Any
    masks_positions: bool = True


def attends(owner: object) -> bool:
    """Return whether a model has attention layers beside those that get boundaries."""
    config = getattr(owner, "config", None)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    return any(map(_is_attention, kinds))


def check(
    owner: Any, kwargs: Mapping[str, object], arguments: Given, bounds: torch.Tensor, rows: int
) -> None:
    """Raise SamplesError if attention layers of a model would mix the samples of a row.

    Args:
        owner: the model.
        kwargs: the arguments that it hands to its layers.
        arguments: what its masks are made of.
        bounds: boundaries of samples; some row has several.
        rows: of the batch.
    """
    if not attends(owner):
        return
    used = str(getattr(owner.config, "_attn_implementation", None) or "eager")
    if not arguments.masks_positions:
        refusal: tuple[str, str] | None = ("no positions reach it", "pass one sample a row")
    elif "flash" in used:
        refusal = _flash(kwargs, arguments, bounds, rows)
    else:  # an implementation of the user's own separates samples by rules of its own
        refusal = _masked(owner, arguments, bounds, rows) if used in _MASKED else None
    if refusal is not None:
        raise SamplesError(
            f"samples share a row, and {used} attention does not keep them apart: {refusal[0]}",
            where=type(owner).__name__,
            fix=refusal[1],
        )


def _masked(owner: Any, arguments: Given, bounds: torch.Tensor, rows: int) -> tuple[str, str] | None:
    masks = _of_attention(arguments.attention_mask)
    is_without_mask = any(mask is None for mask in masks)
    if any(is_of_padding(mask) for mask in masks) or (
        is_without_mask and isinstance(arguments.attention_mask, dict)
    ):
        return (
            "transformers does not read position_ids beside an attention_mask",
            "leave attention_mask out; position_ids of padding behind the samples may be 0",
        )
    if not is_without_mask:  # they come from the user
        return None
    makes = owner.config.use_cache if arguments.use_cache is None else arguments.use_cache
    if makes or arguments.cache is not None:
        return "transformers does not read position_ids beside a cache", "pass use_cache=False"
    return None if _shown(arguments.position_ids, bounds, rows) else _not_shown(arguments.position_ids)


def _flash(
    kwargs: Mapping[str, object], arguments: Given, bounds: torch.Tensor, rows: int
) -> tuple[str, str] | None:
    if any(
        is_of_padding(tensor) and not bool(host_copy(tensor).all())
        for tensor in _of_attention(arguments.attention_mask)
    ):
        return "the attention_mask takes precedence over boundaries", "leave attention_mask out"
    if all(kwargs.get(name) is not None for name in _LENGTHS):
        return None
    if rows == 1 and _shown(arguments.position_ids, bounds, rows, first=0):
        return None
    why = "it separates samples by position_ids in a batch of one row alone, where each begins with 0"
    return why, f"pass {', '.join(_LENGTHS[:-1])} and {_LENGTHS[-1]}"


def _is_attention(kind: object) -> bool:
    return "attention" in str(kind) and not str(kind).startswith("linear")


def _of_attention(attention_mask: object) -> list[Any]:
    """Return the masks that attention layers are given."""
    if not isinstance(attention_mask, dict):
        return [attention_mask]
    return [mask for kind, mask in attention_mask.items() if _is_attention(kind)]


def is_of_padding(mask: object) -> TypeGuard[torch.Tensor]:
    """Return whether a mask is ``[rows, positions]``, and not one for attention as it is."""
    return isinstance(mask, torch.Tensor) and mask.dim() == 2


def positions_of_text(position_ids: object) -> torch.Tensor | None:
    """Return the positions of text, of which transformers makes masks; None: there are none.

    Then they are of time, height and width alone, or no tensor.
    """
    if not isinstance(position_ids, torch.Tensor):
        return None
    if position_ids.dim() == 2:
        return position_ids
    return position_ids[0] if position_ids.dim() == 3 and position_ids.shape[0] == _WITH_TEXT else None


def _shown(position_ids: torch.Tensor, bounds: torch.Tensor, rows: int, first: int | None = None) -> bool:
    """Return whether positions show where samples begin; ``first``: the position of each beginning.

    On a GPU the host waits for them, as it does for transformers' masks.
    """
    text = None if positions_of_text(position_ids) is None else positions_of_text(host_copy(position_ids))
    if text is None:
        return False
    length = ends_of(bounds)[-1] // rows
    text = text.expand(rows, length)
    for row, place in (divmod(start, length) for start in ends_of(bounds)[:-1]):
        here = int(text[row, place])
        if first is None and place and here == int(text[row, place - 1]) + 1:
            return False
        if first is not None and here != first:
            return False
    return True


def _not_shown(position_ids: object) -> tuple[str, str]:
    begin = "position_ids that begin with 0 at each sample"
    if position_ids is None:
        return "its masks are made of position_ids, which were not passed", f"pass {begin}"
    if positions_of_text(position_ids) is None:
        why = "its masks are made of the positions of text, which position_ids do not have"
        return why, f"pass {begin}: four rows, those of text in front of time, height and width"
    return "position_ids count on where a sample begins", f"pass {begin}"
