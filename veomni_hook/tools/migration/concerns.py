"""What a patch is for, told from its code: which slots it asks, what it imports, what it changes upstream.

The name of the model plays no part. What no rule recognises is `OTHER`, with what the code uses as evidence.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from veomni_hook.patches.code.tree import last_name
from veomni_hook.patches.spec import Patch, PatchConfig
from veomni_hook.tools.migration import vocabulary as words
from veomni_hook.tools.migration.reading import (
    about_positions,
    body_of,
    calls,
    class_attributes,
    decorator_names,
    dtype_in_training,
    in_float32,
    only_raises,
    unreached,
)
from veomni_hook.tools.migration.usage import (
    Given,
    Used,
    definition,
    given,
    identifiers,
    parameters,
    replacement,
    used,
)

__all__ = ["IDLE", "Concern", "concerns"]

#: How the evidence of code begins that never runs.
IDLE = "looks in **kwargs for the parameter "

_SLOT = re.compile(rf"(?:{words.OP_SLOT}|{words.CONFIG_SLOT}) ")


@dataclass(frozen=True)
class Concern:
    """One purpose of a patch.

    Attributes:
        name: one of `vocabulary.MEANINGS`.
        evidence: what in the code says so, as `OpSlot rms_norm/standard`.
    """

    name: str
    evidence: str


@dataclass(frozen=True)
class _Code:
    """What the rules look at: the replacement, upstream's body, and what the code uses of the config.

    ``names`` are those that the config gives to the module, ``off`` targets whose replacement only raises.
    """

    patch: Patch
    config: PatchConfig
    new: ast.Module
    old: ast.Module | None
    names: Given
    off: frozenset[str]
    used: Used

    @property
    def method(self) -> str:
        return self.patch.target.rpartition(".")[2] if "." in self.patch.target else ""

    @property
    def fresh(self) -> set[str]:
        """Identifiers of the replacement and its helpers that upstream's body does not have.

        A parameter that upstream does not have counts, even if upstream has a local variable of that name.
        """
        trees = (self.new, *self.used.helpers.values())
        known = parameters(self.old) if self.old is not None else set()
        names = {name for tree in trees for name in identifiers(tree)} - self.lost_from(None)
        return names | (parameters(self.new) - known if self.old is not None else set())

    def lost_from(self, tree: ast.Module | None) -> set[str]:
        """Identifiers of upstream's body that ``tree`` does not have."""
        old = identifiers(self.old) if self.old is not None else set()
        return old - (identifiers(tree) if tree is not None else set())


def concerns(patch: Patch, config: PatchConfig, upstream: str | None = None) -> tuple[Concern, ...]:
    """Return what a patch is for: one `Concern` for each purpose, with its first evidence and every slot.

    Args:
        patch: the patch.
        config: the config that has it; its imports, blocks and helpers say what names mean.
        upstream: the source of the module that the config is for, in the release that it was written for.
            Without it, nothing is compared, and concerns that only a comparison shows are not found.

    Raises:
        ReplacementError: the source of the replacement, or of a helper, cannot be read.
        SyntaxError: ``upstream``, or a block of the config, is not valid Python.
    """
    names, off = _known(config, _size(config))
    new, old = replacement(patch, config), definition(upstream, patch.target)
    code = _Code(patch, config, new, old, names, off, used(new, names))
    contract = words.METHODS.get(code.method) if old is None else None
    if contract is not None:  # a method that VeOmni calls by name, and upstream does not have
        found = [Concern(contract, f"adds {code.method}")]
    elif only_raises(new):
        found = [Concern(words.EXCLUSION, "raises, whatever the arguments")]
    else:
        found = [one for rule in _RULES for one in rule(code)] or [_unrecognised(code)]
    evidence: dict[str, list[str]] = {}
    for one in found:
        texts = evidence.setdefault(one.name, [])
        if not texts or (_SLOT.match(one.evidence) and one.evidence not in texts):
            texts.append(one.evidence)
    return tuple(Concern(name, "; ".join(pieces)) for name, pieces in evidence.items())


def _size(config: PatchConfig) -> tuple[int, ...]:
    """Tells when a config has grown: one config module may extend the config of another."""
    imports, blocks = config.additional_imports, config.post_import_blocks
    helpers = len(config.helpers) + len(config.positioned_helpers)
    return len(config.patches), len(imports), len(blocks), len(config.slots), helpers


@lru_cache(maxsize=8)
def _known(config: PatchConfig, _size: tuple[int, ...]) -> tuple[Given, frozenset[str]]:
    """The names that a config gives to the module, and the targets whose replacement only raises."""
    names = given(config)
    return names, frozenset(one.target for one in config.patches if only_raises(replacement(one, config)))


# Rules on what the code uses


def _slots(code: _Code) -> Iterator[Concern]:
    idle = unreached(code.new)
    for name, (op, variant) in code.used.slots.items():
        text = f"{IDLE}{idle[name]}" if name in idle else _slot_text(op, variant)
        for concern in words.OPS.get(op, (words.KERNEL,)):
            yield Concern(concern, text)
    # Kernels that a patch of the same class's `__init__` takes from slots and keeps in attributes.
    owner = code.patch.target.rpartition(".")[0]
    first = next((one for one in code.config.patches if one.target == f"{owner}.__init__"), None)
    if first is None or first is code.patch or not owner:
        return
    slots = code.names.slots
    for node in ast.walk(replacement(first, code.config)):
        if not isinstance(node, ast.Assign):
            continue
        asked = [
            slots[one.id] for one in ast.walk(node.value) if isinstance(one, ast.Name) and one.id in slots
        ]
        kept = {one.attr for one in node.targets if isinstance(one, ast.Attribute)}
        if kept & identifiers(code.new):
            for op, variant in asked:
                yield Concern(words.KERNEL, _slot_text(op, variant))


def _slot_text(op: str, variant: str) -> str:
    return f"{words.OP_SLOT} {op}/{variant}" if variant else f"{words.CONFIG_SLOT} {op}"


def _imports(code: _Code) -> Iterator[Concern]:
    if source := code.patch.replacement_source:  # the replacement itself is another package's
        module, _, name = source.rpartition(".")
        yield Concern(words.of_module(module, name) or words.OTHER, f"{name} of {module}")
    for origin in code.used.imports.values():
        module, _, name = origin.partition(":")
        concern = words.of_module(module, name)
        if concern:
            yield Concern(concern, f"{name or module} of {module}" if name else module)


def _identifiers(code: _Code) -> Iterator[Concern]:
    fresh = sorted(code.fresh)
    for concern, pattern in words.WORDS.items():
        if names := [name for name in fresh if pattern.fullmatch(name)]:
            yield Concern(concern, ", ".join(names[:3]))


def _decorators(code: _Code) -> Iterator[Concern]:
    """A class replacement keeps no decorator of upstream, and these would bypass the new body."""
    if code.patch.patch_type.value != "class_replacement" or code.old is None:
        return
    lost = decorator_names(code.old) - decorator_names(code.new)
    for name in sorted(name for name in lost if words.HUB_DECORATORS.fullmatch(name)):
        yield Concern(words.KERNEL, f"drops {name}")


# Rules on what the code changes


def _zeros(code: _Code) -> Iterator[Concern]:
    """A product with 0.0 adds nothing but a path for gradients."""
    for node in ast.walk(code.new):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            if any(isinstance(side, ast.Constant) and side.value == 0.0 for side in (node.left, node.right)):
                yield Concern(words.DUMMY_FORWARD, "a term times 0.0, for gradients")
                return


def _dropped(code: _Code) -> Iterator[Concern]:
    """Calls and masks of upstream's code that the replacement does not have."""
    if code.old is None:
        return
    reads = calls(code.old, words.HOST_READS) - calls(code.new, words.HOST_READS)
    # A kernel for experts has no loop over them: not what it is for.
    if reads and all(op != "moe_experts" for op, _ in code.used.slots.values()):
        yield Concern(words.HOST_SYNC, f"drops {', '.join(sorted(reads))}")
    # Features that stay one tensor, and masks without a feature axis, can be exchanged between ranks.
    shapes = re.compile("split|expand_as")
    lost = calls(code.old, shapes) - calls(code.new, shapes)
    if "split" in lost and code.method.startswith("get_"):
        yield Concern(words.SEQUENCE_PARALLEL, "features stay one tensor, not split by image")
    if "expand_as" in lost and code.method == "get_placeholder_mask":
        yield Concern(words.SEQUENCE_PARALLEL, "masks have no feature axis")
    masks = {name for name in code.lost_from(code.new) if name.endswith("_attention_mask")}
    if masks:
        yield Concern(words.PACKING, f"takes no {', '.join(sorted(masks))}")


def _position_ids(code: _Code) -> Iterator[Concern]:
    if words.METHODS.get(code.method) == words.POSITION_IDS:
        yield Concern(words.POSITION_IDS, f"replaces {code.method}")
    elif code.old is not None and (
        changed := [one for one in about_positions(code.new) if one not in about_positions(code.old)]
    ):
        yield Concern(words.POSITION_IDS, changed[0])


def _numerics(code: _Code) -> Iterator[Concern]:
    if code.old is None:
        return
    autocast = re.compile("autocast|maybe_autocast")
    if calls(code.new, autocast).total() > calls(code.old, autocast).total():
        yield Concern(words.NUMERICS, "autocast is off")
    elif wider := sorted(in_float32(code.new) - in_float32(code.old)):
        yield Concern(words.NUMERICS, f"in float32: {', '.join(wider[:3])}")
    elif dtype_in_training(code.new) and not dtype_in_training(code.old):
        yield Concern(words.NUMERICS, "another dtype in training")


def _raw_logits(code: _Code) -> Iterator[Concern]:
    """A router that returns what softmax got, not what it made, leaves softmax to the loss."""
    softmaxed, returned = set(), set()
    for node in ast.walk(code.new):
        if isinstance(node, ast.Call) and last_name(node.func) == "softmax" and node.args:
            softmaxed.add(last_name(node.args[0]))
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple) and node.value.elts:
            returned.add(last_name(node.value.elts[0]))
    both = sorted((softmaxed & returned) - {""})
    if both and "topk" in identifiers(code.new):
        yield Concern(words.LOAD_BALANCING, f"returns {both[0]} before softmax")


def _in_place(code: _Code) -> Iterator[Concern]:
    """What upstream adds in place, and the replacement does not."""
    if code.old is None:
        return
    kept = {name for name, _ in _augmented(code.new)}
    for name, operator in _augmented(code.old):
        if name not in kept and any(
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.BinOp)
            and isinstance(node.value.op, operator)
            and name in {last_name(target) for target in node.targets}
            for node in ast.walk(code.new)
        ):
            yield Concern(words.AUTOGRAD, f"{name} is not changed in place")


def _augmented(tree: ast.Module) -> list[tuple[str, type[ast.operator]]]:
    changed = [node for node in ast.walk(tree) if isinstance(node, ast.AugAssign)]
    return [(node.target.id, type(node.op)) for node in changed if isinstance(node.target, ast.Name)]


def _configuration(code: _Code) -> Iterator[Concern]:
    for node in ast.walk(code.new):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            text = ast.unparse(target)
            if isinstance(target, ast.Attribute) and re.match(r"(self\.)?config\.", text):
                yield Concern(words.CONFIG_FIX, f"sets {text}")


def _attention_backends(code: _Code) -> Iterator[Concern]:
    if code.old is None:
        return
    for new in class_attributes(code.new):
        if re.fullmatch(r"_supports_\w*attn\w*|_compatible_flash_implementations", new[0]):
            if new not in class_attributes(code.old):
                yield Concern(words.ATTENTION_BACKEND, new[0])


def _exclusions(code: _Code) -> Iterator[Concern]:
    gone = code.lost_from(code.new) & set(code.config.exclude)
    if gone:
        yield Concern(words.EXCLUSION, f"does not name {', '.join(sorted(gone)[:2])}")
    owner = code.patch.target.rpartition(".")[0]
    off = {target.rpartition(".")[2] for target in code.off if target.startswith(f"{owner}.")}
    if called := sorted(code.lost_from(code.new) & off):
        yield Concern(words.EXCLUSION, f"does not call {called[0]}")
    body = body_of(code.new)
    if code.old is None and code.config.exclude and len(body) == 1 and isinstance(body[0], ast.Return):
        function = body[0].value.func if isinstance(body[0].value, ast.Call) else None
        if isinstance(function, ast.Attribute) and last_name(function.value) == "self":
            yield Concern(words.EXCLUSION, f"calls self.{function.attr} alone")


_RULES: tuple[Callable[[_Code], Iterator[Concern]], ...] = (
    _slots,
    _imports,
    _decorators,
    _identifiers,
    _zeros,
    _dropped,
    _position_ids,
    _raw_logits,
    _numerics,
    _in_place,
    _configuration,
    _attention_backends,
    _exclusions,
)


def _unrecognised(code: _Code) -> Concern:
    """Upstream's body, at most with the argument that transformers dropped; or what is new there."""
    fresh = sorted(code.fresh)
    if code.old is not None and not fresh and not code.lost_from(code.new):
        return Concern(words.NO_CHANGE, "the names of upstream's body")
    if code.old is not None and fresh == ["cache_position"]:
        return Concern(words.NO_CHANGE, "upstream's body with cache_position")
    said = f"new here: {', '.join(fresh[:4])}" if fresh else "no name that upstream's body lacks"
    return Concern(words.OTHER, said)
