"""Experts: classes that send tokens through stacked weights, told apart by what one expert computes.

The loop around it is read by `veomni_hook.patches.idioms.experts_loop`, its body compared with the functions
``*_expert`` of the op's reference. A kernel is called with operands in the order of the variant's reference.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from veomni_hook.patches.graph import (
    ARGUMENT,
    CALLABLE,
    NUMBER,
    Difference,
    Form,
    Match,
    Rule,
    Scope,
    Unknown,
    canonical,
    digest,
    match,
    reference_form,
    source,
)
from veomni_hook.patches.idioms.experts_loop import ROUTING, STATES, Computation, Loop, OtherLoop, read_loop
from veomni_hook.patches.idioms.site import Site, Status, slot_name
from veomni_hook.patches.idioms.splice import before_body, decorate, free_name
from veomni_hook.patches.idioms.view import ModuleView
from veomni_hook.patches.records import SlotSpec
from veomni_hook.patches.text.document import FunctionNode

__all__ = ["CANDIDATES", "OP", "find"]

OP = "moe_experts"
CANDIDATES = (
    "a class whose name ends in Experts or NaiveMoe, or that holds a parameter of three dimensions, "
    "the first of which is named after experts"
)

_REFERENCE = "kernels/moe_experts/reference.py"
#: Variants of one formula for all experts, with what their results are added up in.
_UNIFORM = {
    "gated": "hidden",
    "gated_clamped": "hidden",
    "gated_clamped_after": "hidden",
    "gated_float32_product": "hidden",
    "gated_jointly": "float32",
    "gated_normalised": "hidden",
    "gated_transposed": "hidden",
    "alpha_gated": "hidden",
    "biased_interleaved_alpha_gated": "hidden",
    "biased_alpha_gated_float32": "float32",
    "ungated": "weights",
}
#: What an operand may be; the others are one expert's share of what is stacked.
_RULES: Mapping[str, Rule] = {
    "act_fn": CALLABLE,
    "norm": CALLABLE,
    "alpha": NUMBER,
    "limit": NUMBER,
}
