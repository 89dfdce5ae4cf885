"""Convolutions over disjoint blocks: a kernel slot at the calls of a class's own convolutions.

    embeddings = self.proj(pixels)  ->  embeddings = slot.call(self, self.proj, pixels)

``self.proj`` is what ``__init__`` creates by calling torch's Conv1d, Conv2d or Conv3d with one expression for
stride and kernel. The slot checks at every call that the object is exactly that, that its sizes are so, and
that nothing observes its calls; else it calls the object.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.tree import calls_in, in_text_order, last_name
from veomni_hook.patches.idioms.module_calls import created_by, sites_of_calls
from veomni_hook.patches.reasons import Code, Reason
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site

__all__ = ["CANDIDATES", "OP", "VARIANT", "WORDS", "difference", "find"]

OP = "patch_projection"
VARIANT = "disjoint_blocks"
WORDS = "Conv"
CANDIDATES = (
    "every method that calls one of its own attributes to which __init__ assigns a call of torch's Conv1d,"
    " Conv2d or Conv3d whose stride is the same expression as its kernel_size, other than 1, maybe in one"
    " branch of a condition; every class whose __init__ creates such a convolution in another way: in a"
    " container, as an argument, or for an attribute that nothing calls; and in a class whose name contains"
    " PatchEmbed every convolution that __init__ creates, whatever its stride"
)


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    created = {
        name: created_by(view, owner, partial(_is_candidate, view, owner))
        for name, owner in view.classes.items()
    }
    uses = partial(_uses, view)
    yield from sites_of_calls(view, (OP, VARIANT), "convolution", created, uses, difference)


_NAMES = frozenset({"Conv1d", "Conv2d", "Conv3d"})
# In torch's order; those without a name here change nothing where there is no padding.
_PARAMETERS = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups")
#: What is equal to the default of a parameter.
_DEFAULTS = {
    "padding": frozenset({"0", "(0,)", "(0, 0)", "(0, 0, 0)", "'valid'"}),
    "dilation": frozenset({"1", "(1,)", "(1, 1)", "(1, 1, 1)"}),
    "groups": frozenset({"1"}),
}


def _uses(view: ModuleView, owner: ast.ClassDef, init: FunctionNode) -> Iterator[tuple[ast.expr, str]]:
    """Where ``__init__`` creates a candidate."""
    if "Conv" in view.text(init):
        for call in in_text_order(call for call in calls_in(init) if _is_candidate(view, owner, call)):
            yield call.func, difference(call) or "the convolution is part of another expression here"


def _is_candidate(view: ModuleView, owner: ast.ClassDef, call: ast.Call) -> bool:
    name = last_name(call.func)
    if name not in _NAMES or view.scope.dotted(call.func) != f"torch.nn.{name}":
        return False
    arguments = _arguments(call)
    kernel = arguments.get("kernel_size", "")
    if kernel == arguments.get("stride") and kernel not in _DEFAULTS["dilation"]:
        return True
    return "PatchEmbed" in owner.name


def difference(call: ast.Call) -> str:
    """Why a convolution is not one over disjoint blocks; empty if it is."""
    arguments = _arguments(call)
    if "kernel_size" not in arguments:
        return "the convolution's kernel is not written at the call"
    kernel, stride = arguments["kernel_size"], arguments.get("stride", "1")
    if kernel != stride:
        return Reason(f"the convolution's stride is {stride}, its kernel {kernel}", Code.OTHER_SETTING)
    for name, same in _DEFAULTS.items():
        if (value := arguments.get(name, "")) and value not in same:
            return Reason(f"the convolution has {name}={value}", Code.OTHER_SETTING)
    return ""


def _arguments(call: ast.Call) -> dict[str, str]:
    """The arguments of a convolution as text; without those behind a star."""
    arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg}
    for name, value in zip(_PARAMETERS, call.args, strict=False):
        if isinstance(value, ast.Starred):
            break
        arguments[name] = ast.unparse(value)
    return arguments
