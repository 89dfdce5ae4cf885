"""What became of the routed sites of a module in a rewrite of it, and of the operands that were bound there."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from tests.proof.texts import definition
from veomni_hook.patches import engine
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.scope import parameter_names
from veomni_hook.patches.code.tree import FUNCTIONS
from veomni_hook.patches.idioms.recognise import OPTIONAL, recognise
from veomni_hook.patches.site import Site, Status
from veomni_hook.tools.lock.inserted import Arguments, inserted_calls, lost, swapped

#: Operands without which no number is another: sizes are read one by one, and a tower may be called twice.
_HELPS = ("elsewhere", "precomputed")
#: What a fusion of several statements is without it.
_PARTS = {
    "add_rms_norm": ("rms_norm",),
    "add_layer_norm": ("layer_norm", "nn_layer_norm"),
    "qk_norm_rotary": ("rms_norm", "rotary"),
}
#: Operands that name fields of outputs, which keep their names where parameters get others.
_FIELDS = ("outputs",)


@dataclass(frozen=True)
class Found:
    """A site with the arguments of the calls that it inserts.

    Attributes:
        site: what an idiom says of it.
        arguments: their texts, by function and parameter.
        parameters: of the function that it is in.
    """

    site: Site
    arguments: Arguments
    parameters: frozenset[str]

    @property
    def key(self) -> tuple[str, str]:
        """What names it in any release."""
        return self.site.op, self.site.target

    @property
    def routed(self) -> bool:
        """Whether it is routed."""
        return self.site.status is Status.ROUTED


@dataclass(frozen=True)
class Became:
    """What became of one site: ``routed``, ``otherwise``, ``missed`` (with a reason), ``lost`` or ``wrong``."""

    op: str
    target: str
    what: str
    detail: str = ""


def found(module: str, text: str) -> list[Found]:
    """The sites of a module, with those of idioms that apply only with a setting.

    Raises:
        IdiomError: an idiom fails, or what it writes.
    """
    tree = ast.parse(text)
    sites: list[Found] = []

    def recorded(document: Document, **more: Any) -> list[Site]:
        recognised = list(recognise(document, **more))
        for site in recognised:
            calls = inserted_calls(document, site) if site.status is Status.ROUTED else {}
            sites.append(Found(site, calls, _parameters(tree, site.target)))
        return recognised

    with patch.object(engine, "recognise", recorded):
        origin = engine.Origin(module, f"{module}.py", "transformers", "99")
        engine.patch_source(text, [], origin, idioms=True, optional=OPTIONAL)
    return sites


def _parameters(tree: ast.Module, target: str) -> frozenset[str]:
    try:
        node = definition(tree, target)
    except (StopIteration, RuntimeError):
        return frozenset()
    return frozenset(parameter_names(node)) if isinstance(node, FUNCTIONS) else frozenset()


def became(before: list[Found], after: list[Found], names: Mapping[str, str]) -> list[Became]:
    """What became of each routed site of ``before``; ``names`` are those that parameters have now."""
    left = list(after)
    known = {each.key for each in before}
    results: list[Became] = []
    open_: list[Found] = []
    for one in (each for each in before if each.routed):
        same = [each for each in left if each.key == one.key and each.routed]
        if same:
            best = min(same, key=lambda each: len(_unlike(one, each, names)))
            left = [each for each in left if each is not best]
            # What one place inserts depends on others that call the same; they may be missed now.
            beside = sum(each.routed and each.key == one.key for each in before) > len(same)
            unlike = _unlike(one, best, names)
            what = (
                "routed"
                if not unlike
                else "wrong"
                if "wrong" in unlike.values() and not beside
                else "otherwise"
            )
            results.append(Became(*one.key, what, "; ".join(unlike)))
        else:
            open_.append(one)
    for one in open_:
        moved = [e for e in left if e.routed and e.site.op == one.site.op and e.key not in known]
        moved = [e for e in moved if e.site.variant == one.site.variant]
        if moved:
            left = [each for each in left if each is not moved[0]]
            results.append(Became(*one.key, "routed", f"as {moved[0].site.target}"))
            continue
        results.append(_unrouted(one, before, after, left))
    return results


def _unrouted(one: Found, before: list[Found], after: list[Found], left: list[Found]) -> Became:
    reasons = [e.site.reason for e in left if e.key == one.key and not e.routed]
    # Its code, or what it calls, may be elsewhere now.
    former = {e.site.target for e in before if not e.routed and e.site.op == one.site.op}
    reasons += [
        e.site.reason
        for e in left
        if not e.routed and e.site.op == one.site.op and e.site.target not in former
    ]
    reason = next((each for each in reasons if each), "")
    if not reason and {e.site.op for e in after if e.routed} & {*_PARTS.get(one.site.op, ())}:
        return Became(*one.key, "otherwise", "its parts are not fused")
    return Became(*one.key, "missed" if reason else "lost", reason)


def _unlike(before: Found, after: Found, names: Mapping[str, str]) -> dict[str, str]:
    """What is not as before, and whether it is ``wrong``, or routed ``otherwise``, which the proof judges.

    It is wrong if a call that is still inserted lost an argument or got another parameter, or has an old name.
    """
    if before.site.variant != after.site.variant:
        return {f"the variant was {before.site.variant} and is {after.site.variant}": "otherwise"}
    old, new = before.arguments, after.arguments
    unlike = {
        f"{name} is lost": "otherwise" if name.partition(" ")[0] in _HELPS else "wrong"
        for name in lost(old, new)
    }
    if gone := sorted(old.keys() - new.keys()):
        unlike[f"{', '.join(gone)} is not called"] = "otherwise"
    unlike |= {
        f"{name} was {text} and is {now}": "wrong"
        for name, text, now in swapped(old, new, names, after.parameters)
        if text in before.parameters
    }
    gone = {name for name in names if name not in after.parameters}
    quoted = {f"{quote}{name}{quote}" for name in names for quote in "'\""}
    unlike |= {
        f"{function} {name} is still {text}": "wrong"
        for function, arguments in new.items()
        for name, text in arguments.items()
        if text in gone & before.parameters
        or (name.partition(" ")[0] not in _FIELDS and any(name in text for name in quoted))
    }
    # Captures are named after upstream's locals, and one of several places may be paired with another.
    pairs = zip(before.site.captures.values(), after.site.captures.values(), strict=False)
    unlike |= {
        f"{text} is {now} now": "otherwise"
        for text, now in pairs
        if text in before.parameters and now in after.parameters and now not in (text, names.get(text))
    }
    if len(before.site.captures) != len(after.site.captures):
        unlike["the number of captures is another"] = "otherwise"
    return unlike
