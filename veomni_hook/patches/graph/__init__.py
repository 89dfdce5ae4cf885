"""The canonical form of a function: what its tensor code computes, as an expression graph.

Two functions with the same form compute the same. `canonical` returns the form of a function,
`reference_form` the form of a kernel's reference function; `match` compares them, `find` searches in a form.

Nodes and forms: `nodes`, `operations`, `normal_forms`. From code to a form: `scope` (names of the module),
`formula` (the domain for the interpreter, with `calls` and `changes`), `forms`. On forms: `matching`.
"""

from veomni_hook.patches.graph.calls import HARMLESS_DECORATORS
from veomni_hook.patches.graph.forms import (
    canonical,
    layouts,
    recognised,
    reference_form,
    reference_names,
    reference_scope,
    specific_first,
    variant_names,
)
from veomni_hook.patches.graph.matching import (
    ANY,
    ARGUMENT,
    ATTRIBUTE,
    FUNCTION,
    NUMBER,
    TENSOR,
    Difference,
    Leaf,
    Match,
    Rule,
    branches,
    decided,
    digest,
    find,
    match,
)
from veomni_hook.patches.graph.nodes import (
    Form,
    Node,
    constant,
    has_source,
    is_constant,
    rebuild,
    source,
    walk,
)
from veomni_hook.patches.graph.normal_forms import renormalised
from veomni_hook.patches.graph.operations import FLOAT32, dtype_of
from veomni_hook.patches.graph.scope import Scope
from veomni_hook.patches.interpreter.walk import receiver_name

__all__ = [
    "ANY",
    "ARGUMENT",
    "ATTRIBUTE",
    "FLOAT32",
    "FUNCTION",
    "HARMLESS_DECORATORS",
    "NUMBER",
    "TENSOR",
    "Difference",
    "Form",
    "Leaf",
    "Match",
    "Node",
    "Rule",
    "Scope",
    "branches",
    "canonical",
    "constant",
    "decided",
    "digest",
    "dtype_of",
    "find",
    "has_source",
    "is_constant",
    "layouts",
    "match",
    "rebuild",
    "receiver_name",
    "recognised",
    "reference_form",
    "reference_names",
    "reference_scope",
    "renormalised",
    "source",
    "specific_first",
    "variant_names",
    "walk",
]
