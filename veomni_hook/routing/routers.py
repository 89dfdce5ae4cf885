"""The routers of a model, by name, and the blocks of experts whose router is not recognised."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import nn

from veomni_hook.errors import RoutingError
from veomni_hook.kernels.explain.no_slots import no_slots
from veomni_hook.kernels.explain.places import places_of
from veomni_hook.kernels.shared.origin import definition_of
from veomni_hook.layout import counted, shortened
from veomni_hook.patches.code.scope import parameter_names
from veomni_hook.patches.code.tree import own_attribute, walk_ast

__all__ = ["Routers", "routers_of"]

#: Names that wrappers (checkpoints, FSDP, torch.compile) put between the names of a model.
_WRAPPERS = {"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod"}
#: What a router calls that chooses.
_CHOICES = frozenset(("topk", "argmax", "sort", "argsort"))
#: Dimensions of a table: rows, and the experts of each.
_TABLE = 2


class Routers(NamedTuple):
    """The recognised routers of a model.

    Attributes:
        names: the name of each, without those of wrappers.
        stacks: the names by the list of layers that they are in: a pass runs all of them, or none.
    """

    names: Mapping[nn.Module, str]
    stacks: Mapping[str, tuple[str, ...]]

    def uncalled(self, called: Collection[str]) -> list[str]:
        """Return the routers that did not ask although others of their layers did; all if none asked."""
        if not called:
            return list(self.names.values())
        return [
            name
            for stack in self.stacks.values()
            if not set(stack).isdisjoint(called)
            for name in stack
            if name not in called
        ]


def routers_of(model: nn.Module, leave: Collection[str], where: str) -> Routers:
    """Return the recognised routers of ``model``, those left out whose name matches a pattern of ``leave``.

    Routers that look experts up by the ids of tokens choose nothing, and are left out as well.

    Raises:
        RoutingError: the model has none, or a block of experts has a router that is not recognised.
        KernelError: the model is not patched; the message says why.
    """
    ops: dict[type, set[str]] = {}
    slotted = False
    names: dict[nn.Module, str] = {}
    experts: list[str] = []
    looking_up: list[str] = []
    upstreams = _upstreams_routers(model)
    for full, module in model.named_modules():
        kind = type(module)
        if kind not in ops:
            places = places_of(kind)
            slotted = slotted or bool(places)
            ops[kind] = {place.slot.op for place in places}
        if "moe_router" in ops[kind]:
            names[module] = _bare(full)
        elif _looks_up(module):
            looking_up.append(_bare(full))
        elif "moe_experts" in ops[kind] or kind in upstreams:
            experts.append(_bare(full))
    if not slotted:
        raise no_slots(model, where)
    known = (*names.values(), *looking_up)
    unknown = [name for name in _without_router(experts, known) if not _matches(name, leave)]
    kept = {module: name for module, name in names.items() if not _matches(name, leave)}
    if unknown:
        raise RoutingError(
            f"{counted(len(unknown), 'block')} whose router is not recognised: {shortened(unknown)}",
            where=where,
            fix="`veomni-hook list FAMILY` says why; leave=(...) with patterns of these names spares them",
        )
    if not kept:
        raise RoutingError(
            f"a {type(model).__name__} has no recognised router",
            where=where,
            fix="`veomni-hook list FAMILY` shows which routers are recognised",
        )
    stacks: dict[str, list[str]] = {}
    for name in kept.values():
        stacks.setdefault(_stack(name), []).append(name)
    return Routers(kept, {stack: tuple(members) for stack, members in stacks.items()})


def _looks_up(module: nn.Module) -> bool:
    """Whether a module reads rows of a table of whole numbers by one of its arguments, and chooses nothing.

    indices = self.expert_of_token[input_ids.reshape(-1)]
    """
    tables = {
        name
        for name, table in module.named_buffers(recurse=False)
        if table.dim() == _TABLE and not (table.is_floating_point() or table.dtype == torch.bool)
    }
    if not tables:
        return False
    try:
        function = definition_of(type(module).forward)
    except (OSError, TypeError, SyntaxError):  # what it reads is not known
        return False
    nodes = [*walk_ast(function)]
    if any(isinstance(node, ast.Attribute) and node.attr in _CHOICES for node in nodes):
        return False
    read = (node for node in nodes if isinstance(node, ast.Subscript) and own_attribute(node.value) in tables)
    arguments = parameter_names(function) - {"self"}
    return any(getattr(part, "id", "") in arguments for node in read for part in walk_ast(node.slice))


def _bare(name: str) -> str:
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(parts[1:] if parts[:1] == ["module"] else parts)


def _stack(name: str) -> str:
    """The name of the list of layers that a router is in: what is in front of the first number."""
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[:number])


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _without_router(experts: Collection[str], routers: Collection[str]) -> Iterator[str]:
    """The blocks that hold experts, or a router that upstream names, and no recognised router."""
    blocks = dict.fromkeys(name.rpartition(".")[0] for name in experts)
    for block in blocks:
        inside = block + "." if block else ""
        if not any(router == block or router.startswith(inside) for router in routers):
            yield block or "the model"


def _upstreams_routers(model: nn.Module) -> set[type]:
    """The classes from which transformers collects the logits of routers."""
    classes: set[type] = set()
    for kind in {type(model), *(type(child) for child in model.children())}:
        recorders = (getattr(kind, "_can_record_outputs", None) or {}).get("router_logits", ())
        entries = recorders if isinstance(recorders, (list, tuple)) else (recorders,)
        targets = (getattr(one, "target_class", one) for one in entries)
        classes.update(target for target in targets if isinstance(target, type))
    return classes
