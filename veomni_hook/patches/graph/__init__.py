"""The canonical form of a function: what its tensor code computes, as an expression graph.

Two functions with the same form compute the same. `canonical` returns the form of a function,
`reference_form` the form of a kernel's reference function; `match` compares them, `find` searches in a form.
"""

from veomni_hook.patches.graph.forms import Form, Unknown, branches, canonical, reference_form
from veomni_hook.patches.graph.digests import digest
from veomni_hook.patches.graph.matching import (
    ANY,
    ARGUMENT,
    ATTRIBUTE,
    FUNCTION,
    NUMBER,
    TENSOR,
    Difference,
    Match,
    Rule,
    find,
    match,
)
from veomni_hook.patches.graph.nodes import Node, walk
from veomni_hook.patches.graph.references import recognised, reference_names
from veomni_hook.patches.graph.scope import Scope
from veomni_hook.patches.graph.printing import source

__all__ = [
    "ANY",
    "ARGUMENT",
    "ATTRIBUTE",
    "Difference",
    "FUNCTION",
    "Form",
    "Match",
    "NUMBER",
    "Node",
    "Rule",
    "Scope",
    "TENSOR",
    "Unknown",
    "branches",
    "canonical",
    "digest",
    "find",
    "match",
    "recognised",
    "reference_form",
    "reference_names",
    "source",
    "walk",
]
