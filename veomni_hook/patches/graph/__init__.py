"""The canonical form of a function: what its tensor code computes, as an expression graph.

Two functions with the same form compute the same. `canonical` returns the form of a function,
`reference_form` the form of a kernel's reference function; `match` compares them, `find` searches in a form.

Nodes and their normal forms: `nodes`, `dtypes`, `torch_operations`, `arithmetic`, `indexing`, `normal_forms`.
From code to a form: `scope` (names of the module), `formula` (the domain for the interpreter, with `calls`,
`loops` and `memory`), `forms`. On forms: `branching`, `matching`, `references`, `digests`,
`printing`.
"""

from veomni_hook.patches.graph.branching import Leaf, branches, decided
from veomni_hook.patches.graph.calls import HARMLESS_DECORATORS
from veomni_hook.patches.graph.digests import digest
from veomni_hook.patches.graph.dtypes import FLOAT32, dtype_of
from veomni_hook.patches.graph.forms import Form, Unknown, canonical
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
from veomni_hook.patches.graph.nodes import Node, constant, is_constant, rebuild, walk
from veomni_hook.patches.graph.normal_forms import renormalised
from veomni_hook.patches.graph.printing import has_source, source
from veomni_hook.patches.graph.references import (
    recognised,
    reference_form,
    reference_names,
    reference_scope,
    specific_first,
    variant_names,
)
from veomni_hook.patches.graph.scope import Scope
from veomni_hook.patches.interpreter.functions import receiver_name

__all__ = [
    "ANY",
    "ARGUMENT",
    "ATTRIBUTE",
    "Difference",
    "FLOAT32",
    "FUNCTION",
    "Form",
    "HARMLESS_DECORATORS",
    "Leaf",
    "Match",
    "NUMBER",
    "Node",
    "Rule",
    "Scope",
    "TENSOR",
    "Unknown",
    "branches",
    "canonical",
    "constant",
    "decided",
    "digest",
    "dtype_of",
    "find",
    "has_source",
    "is_constant",
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
