"""Why a layer loop is refused, in words that name the kind of layer where there is one."""

from __future__ import annotations

import ast
import re
from itertools import product

from veomni_hook.patches.code.tree import own_attribute, walk_ast
from veomni_hook.patches.idioms.gated_delta_rule import separated_methods
from veomni_hook.patches.idioms.layer_loop.modules import Attributes
from veomni_hook.patches.idioms.layer_loop.values import classes_in
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Reason

__all__ = ["TOWER", "attends", "reason_for"]

#: How the reason begins why a loop over the layers of a tower is left alone, which is no error.
TOWER = "a tower that runs at full length on every rank"

_LAYERS_UNKNOWN = "the classes of the layers are not known"
#: Kinds of layers that mix positions, by what their code mentions.
_KINDS = (
    (
        re.compile(r"recurrent_state|delta_rule|selective_scan|ssm_state|_scan\b|linear_attn_cache"),
        "recurrent layers",
    ),
    (re.compile(r"[Cc]onv1d|conv_state"), "convolutions along the positions"),
    (re.compile(r"self\.indexer\b|index_topk"), "attention to positions that an indexer chooses"),
)


def reason_for(view: ModuleView, owner: ast.ClassDef, loop: ast.For, first: str) -> str:
    """The reason for a refusal.

    Args:
        view: the file.
        owner: the class with the loop.
        loop: the loop.
        first: what could not be proven.
    """
    text = ast.unparse(loop)
    if "deepstack" in text:
        text = "deepstack: features of an image are added between the layers"
        return Reason(text, Code.OTHER_LOOP, loop.lineno)
    # If the layers are not known, the reason may be anywhere in the file.
    names = _classes(view, owner, loop) or list(view.classes if _LAYERS_UNKNOWN in first else ())
    # A layer whose rule is routed is the cause if no other one is.
    routed = {separated_method.partition(".")[0] for separated_method in separated_methods(view)}
    for (pattern, kind), name in sorted(product(_KINDS, names), key=lambda pair: pair[1] in routed):
        owner = view.classes[name]
        if any(pattern.search(view.text(method)) for method in view.methods(owner).values()):
            return Reason(f"{kind}: {name}", Code.MIXES_POSITIONS, owner.lineno)
    if re.search(r"per_layer_input", text):
        return Reason("per-layer inputs, which are not sliced", Code.OTHER_LOOP, loop.lineno)
    if "layerdrop" in text:
        text = "layers are skipped at random, which differs between ranks"
        return Reason(text, Code.RANDOM, loop.lineno)
    return first


def attends(view: ModuleView, owner: ast.ClassDef, loop: ast.For) -> bool:
    """Whether the modules of a loop hold attention of the user's implementation."""
    return any("get_interface(" in view.text(view.classes[name]) for name in _classes(view, owner, loop))


def _classes(view: ModuleView, owner: ast.ClassDef, loop: ast.For) -> list[str]:
    """The classes of the file that run in the layers."""
    attributes = Attributes(view)
    own = attributes.of(owner.name)
    pending = classes_in(own[name] for name in map(own_attribute, walk_ast(loop)) if name in own)
    running: list[str] = []
    for name in pending:  # the list grows during the loop
        if name in view.classes and name not in running:
            running.append(name)
            pending += classes_in(attributes.of(name).values())
    return running
