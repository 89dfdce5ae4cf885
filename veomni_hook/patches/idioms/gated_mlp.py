"""Gated MLPs: ``activation(gate) * up`` and its clamped relatives, whatever stands around it.

Only the elementwise middle goes to a kernel, so projections may be fused, biased, quantised or wrapped, and what
follows (dropout, norm, multipliers) stays upstream's. Which activation it is, is for the kernel to ask.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from veomni_hook.patches.graph import ANY, ATTRIBUTE, Difference, Form, Match, Node, Scope, Unknown
from veomni_hook.patches.graph import canonical, digest, match, reference_form
from veomni_hook.patches.idioms.projections import gated_products, holds_experts, is_activation
from veomni_hook.patches.idioms.site import Site, Splice, Status, slot_name
from veomni_hook.patches.idioms.splice import free_name
from veomni_hook.patches.idioms.takeover import Run, blocks, guard, put_together, target
from veomni_hook.patches.idioms.view import ModuleView
from veomni_hook.patches.records import SlotSpec
from veomni_hook.patches.structure.scope import local_names
from veomni_hook.patches.text.document import FunctionNode

__all__ = ["CANDIDATES", "OP", "find"]

OP = "gated_mlp"
CANDIDATES = (
    "a class, other than experts, that uses gate_proj, up_proj and down_proj, or a fused gate_up projection, and an "
    "activation; or that multiplies an activated projection with a projection"
)
