"""The file whose layers are followed: what its idioms know of it, and what following the layers finds out."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from veomni_hook.patches.code.scope import global_bindings
from veomni_hook.patches.code.template import Found
from veomni_hook.patches.idioms import causal_conv, gated_delta_rule
from veomni_hook.patches.idioms.layer_loop.modules import Attributes
from veomni_hook.patches.idioms.moe_experts import find as moe_experts
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site, Status

__all__ = ["File"]


class File:
    """A file with layers.

    Args:
        view: the file.
        tower: whether attention stays within segments, as in towers.

    Attributes:
        attributes: those of its classes.
        names: the names that it binds at its top level.
        experts: the classes of experts, and whether their own idiom knows what they compute.
        rules: where the names of functions begin whose calls get all positions of a share of the heads.
        convolutions: the same, of convolutions along the positions whose part begins with zeros.
        before: whether code before the layers is followed: what is not clear there holds all positions.
        masks: arguments of calls that must be this process's part of a mask.
        segments: attention by segments in the methods that were followed.
        boundaries: what a tower's forward calls the boundaries of these segments.
    """

    def __init__(self, view: ModuleView, *, tower: bool = False) -> None:
        self.view, self.tower = view, tower
        self.attributes = Attributes(view)
        self.names = global_bindings(view.document.tree)
        sites = view.sites(moe_experts.find)
        self.experts = {site.target.partition(".")[0]: site.status is Status.ROUTED for site in sites}
        self.rules = _routed(view, gated_delta_rule.find)
        # Layers are counted by their rules when they run: one that convolves alone would count as missed.
        self.convolutions = _routed(view, causal_conv.find) if self.rules else frozenset()
        self.before = False
        self.masks: dict[int, ast.expr] = {}
        self.segments: list[Found] = []
        self.boundaries: set[str] = set()


def _routed(view: ModuleView, find: Callable[[ModuleView], Iterator[Site]]) -> frozenset[int]:
    """Where the names of functions begin whose calls an idiom routes."""
    sites = (site for site in view.sites(find) if site.status is Status.ROUTED)
    return frozenset(edit.start for site in sites for edit in site.edits)
