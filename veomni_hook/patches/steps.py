"""One config's steps for one module: its patches, and their imports, blocks, helpers and slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from veomni_hook.patches.adopt import adopt_helper
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.plan import Step
from veomni_hook.patches.routes.config import NAME
from veomni_hook.patches.selection import is_present, selected
from veomni_hook.patches.spec import Patch, PatchConfig, PatchType, SlotSpec

__all__ = ["patch_steps", "surroundings"]


def patch_steps(config: PatchConfig, document: Document) -> Iterator[Step]:
    """Yield the patches of a config that apply to the module, and its exclusions."""
    for patch, declared in selected(config, document):
        reason = patch.description or ""
        yield Step(patch.patch_type.value, patch.target, reason, config, patch, declared)
    for name in dict.fromkeys(config.exclude):
        if is_present(config, document, "exclude", name):
            yield Step("exclude", name, f"Leave out {name}", config, name)


def surroundings(config: PatchConfig, kept: Sequence[Step], document: Document) -> Iterator[Step]:
    """Yield what a config adds besides its patches; ``kept`` are the patches that are carried out."""
    for spec in config.additional_imports:
        yield Step(PatchType.ADDITIONAL_IMPORT.value, spec.module, f"Import from {spec.module}", config, spec)
    for slot in _slots(config, kept):
        yield Step("slot", slot.name, f"Kernel slot for {slot.op}/{slot.variant}", config, slot)
    for block in config.post_import_blocks:
        if block.strip():
            first = block.strip().splitlines()[0]
            yield Step("post_import_block", first, "Code after the imports", config, block)
    yield from _helpers(config, document)
    for name in sorted(config.drop_imported_names):
        if is_present(config, document, "drop_import", name):
            yield Step("drop_import", name, f"Drop upstream's import of {name}", config, name)


def _slots(config: PatchConfig, kept: Sequence[Step]) -> list[SlotSpec]:
    """The slots of a config; for routes, only those that a remaining route needs."""
    if config.name != NAME:
        return config.slots
    sites = [step.payload.site for step in kept if isinstance(step.payload, Patch)]
    asked = {slot.name for site in sites if site is not None for slot in site.slots}
    return [slot for slot in config.slots if slot.name in asked]


def _helpers(config: PatchConfig, document: Document) -> Iterator[Step]:
    for helper in config.helpers:
        yield Step("helper", _name(helper), "Helper of the patches", config, helper)
    for given in config.positioned_helpers:
        placed = adopt_helper(given)
        reason = f"Helper after {placed.target}"
        if is_present(config, document, "helper", placed.target):
            yield Step("helper", _name(placed.helper), reason, config, placed)


def _name(helper: object) -> str:
    return str(getattr(helper, "__name__", helper))
