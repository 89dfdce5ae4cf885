"""What each parallel axis does in a model, as lines of `veomni_hook.explain`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from veomni_hook.finders.state import STATE
from veomni_hook.layout import counted
from veomni_hook.parallel import process
from veomni_hook.parallel.expert_plans import ep_size, experts_of, is_ours
from veomni_hook.patches.expert_release import NAME
from veomni_hook.patches.idioms.layer_loop.reasons import TOWER

if TYPE_CHECKING:
    from torch import nn

__all__ = ["notes_on", "notes_on_experts"]

#: Implementations of attention that may go around a ring.
_MERGED = ("eager", "sdpa")
_OP, _SHARDED, _SPLIT, _WHOLE_KEYS = "layer_loop", "sharded", "split", "whole_keys"


def notes_on(model: nn.Module) -> tuple[str, ...]:
    """Return a line for each base model whose sequences processes share, and each tower, or why they cannot.

    Empty if the setting `parallel` has no ``sp``.
    """
    size = process.sizes().sp
    if size == 1:
        return () if (reason := process.left_out()) is None else (reason,)
    notes = dict.fromkeys(note for module in model.modules() for note in _notes(module, size))
    if notes:
        from veomni_hook.parallel import peer_memory  # wants torch.distributed, which a build may lack

        notes |= dict.fromkeys(f"sp={size}: {note}" for note in peer_memory.notes())
    return tuple(notes) or (f"sp={size}: no layer loop is known in it, so every process runs all of it",)


def _notes(module: nn.Module, size: int) -> Iterator[str]:
    for owner in type(module).__mro__:
        outcome = STATE.outcomes.get(owner.__module__)
        target = f"{owner.__name__}.forward"
        report = {} if outcome is None or not outcome.patched else outcome.report
        for missed in report.get("missed", ()):
            if missed["op"] == _OP and missed["target"] == target:
                yield _left(owner.__name__, missed["reason"], size)
        for patch in report.get("applied", ()):
            if patch.get("op") == _OP and patch["target"] == target:
                if patch.get("variant") == _SHARDED:
                    applied = [other.get("variant") for other in report.get("applied", ())]
                    yield _shared(module, owner.__name__, size, whole_keys=_WHOLE_KEYS in applied)
                elif patch.get("variant") == _SPLIT:
                    yield _split(module, owner.__name__, size)


def _left(name: str, reason: str, size: int) -> str:
    if reason.startswith(TOWER):
        return f"sp={size}: {name} is {reason}"
    return f"sp={size}: {name} cannot be trained with it: {reason}"


def _split(module: nn.Module, name: str, size: int) -> str:
    from veomni_hook.parallel.towers import replaced_layer

    if replaced := replaced_layer(module):
        return _left(name, f"{TOWER}: {replaced} in its layers has a forward that is not upstream's", size)
    return (
        f"sp={size}: with gradients, each of {size} processes runs the layers of {name} on its share of the "
        "images, frames or chunks of sound"
    )


def _shared(module: nn.Module, name: str, size: int, *, whole_keys: bool) -> str:
    config = getattr(module, "config", None)
    implementation = getattr(config, "_attn_implementation", None) or "eager"
    keys = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    told = (
        f"sp={size}: with gradients, each of {size} processes runs the layers of {name} on its part of the "
        f"positions; attention ({implementation}) gets "
    )
    if whole_keys:
        told += "its queries there, and the keys of all positions"
    else:
        heads = getattr(config, "num_attention_heads", None)
        told += _ring(heads, keys, size, implementation) or "all positions" + _share(heads, keys, size, "")
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        keys = getattr(config, "linear_num_key_heads", None)
        values = getattr(config, "linear_num_value_heads", None)
        told += "; rules of linear attention get all positions"
        # Where keys and values have the same heads, they have one number.
        told += _share(values or getattr(config, "linear_num_heads", None), keys, size, "value ")
    return told


def _ring(heads: object, keys: object, size: int, implementation: str) -> str:
    """What a process gets if keys go around a ring; else nothing."""
    if not isinstance(heads, int) or not isinstance(keys, int) or implementation not in _MERGED:
        return ""
    from veomni_hook.parallel.groups import neighbours

    near = neighbours(size, heads, keys)
    if near == size:
        return ""
    told = "its positions and all heads" if near == 1 else f"the positions of {near} processes"
    told += "" if near == 1 else f" and {heads // near} of {counted(heads, 'head')}"
    told += f", while keys go around a ring of {size // near}"
    if heads % size == 0:
        told += f"; on a GPU with a mask, or not in 16 bits, all positions{_share(heads, keys, size, '')}"
    return told


def _share(heads: object, keys: object, size: int, kind: str) -> str:
    """The share of heads that a process gets, if their number is known."""
    if not isinstance(heads, int):
        return ""
    if heads % size:
        return f", but {size} does not divide its {counted(heads, f'{kind}head')}: training is refused"
    told = f" and {heads // size} of {counted(heads, f'{kind}head')}"
    if isinstance(keys, int) and keys % size:
        told += f" (of {counted(keys, 'key head')}, repeated first)"
    return told


_HOW = {
    NAME: "a token is sent once to each process that has experts for it",
    "all_to_all": "transformers sends a token once for each of its experts",
}


def notes_on_experts(model: nn.Module) -> tuple[str, ...]:
    """Return a line for each class of experts that processes share, or that the setting could not reach.

    Empty if neither the setting has ``ep`` nor the model divided experts.
    """
    asked = process.sizes().ep
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    if (size := ep_size(model)) == 1:
        own = "the script gave a distributed_config of its own"
        why = "it was not loaded with from_pretrained" if config is None else own
        return () if asked == 1 else (f"ep={asked}: the experts of this model are whole: {why}",)
    how = _HOW.get(
        NAME if is_ours(model) else getattr(config, "ep_implementation", "all_to_all"),
        "transformers dispatches tokens",
    )
    counts = Counter((type(module).__name__, module.num_experts) for _, module in experts_of(model))
    return tuple(
        f"ep={size}: each of {size} processes holds {counted(count, 'expert')} of {name}, in "
        f"{counted(places, 'module')}; {how}"
        for (name, count), places in counts.items()
    )
