"""Where transformers sets the implementation of experts or attention: record that a user made the choice.

Not kernel code: inserts calls of an op's ``provenance`` (`veomni_hook.kernels.shared.recorded_choice` has the
reason) into

* the setter of a config's ``_<kind>_implementation`` and the method that excludes private keys from saved
  data, both or neither;
* a model's ``set_<kind>_implementation``.

They are found by their assignments. If a release is built differently, there is no site, and provenance
reports that the origin is unknown.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import NamedTuple

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.tree import chain, walk_ast
from veomni_hook.patches.routes.guards import after_body, before_body
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site, Status

__all__ = ["CANDIDATES", "OP", "WORDS", "find"]

#: The op that lists it; its sites name their own.
OP = "attention"
WORDS = "_attn_implementation_internal | _experts_implementation_internal"
CANDIDATES = "nothing is counted: these are the switches of attention and experts, not attention and experts"

#: Parameters that the setter of a model may have beside the value.
_OTHERS = {"allow_all_kernels"}


class _Setting(NamedTuple):
    """A setting of a config and a model.

    Attributes:
        op: the op whose kernels yield to the user's choice.
        kind: ``experts`` in ``experts_implementation``.
    """

    op: str
    kind: str

    @property
    def property_name(self) -> str:
        """The config's property."""
        return f"_{self.kind}_implementation"

    @property
    def resolved(self) -> str:
        """The attribute that holds what will run."""
        return f"{self.property_name}_internal"

    def sites(self, view: ModuleView) -> Iterator[Site]:
        """The config class and the model class of transformers' own modules; nothing elsewhere."""
        for owner in view.classes.values():
            setter, saved = self._setter_of(owner), view.methods(owner).get("_remove_keys_not_serialized")
            if setter is not None and saved is not None and len(saved.args.args) == 2:
                call = f"note_assignment({_two_parameters(setter)})"
                yield self._site(view, f"{owner.name}.{setter.name}.setter", setter, call)
                call = f"forget_choice({saved.args.args[1].arg})"
                yield self._site(view, f"{owner.name}.{saved.name}", saved, call)
            request = view.methods(owner).get(f"set{self.property_name}")
            if request is not None and self._is_request(request):
                call = f"note_request({_two_parameters(request)})"
                yield self._site(view, f"{owner.name}.{request.name}", request, call, after_body)

    def _site(
        self,
        view: ModuleView,
        target: str,
        function: FunctionNode,
        call: str,
        insert: Callable[[ModuleView, FunctionNode, str, str], tuple[Edit, ...]] = before_body,
    ) -> Site:
        # Imported at the rare call: transformers imports the config module as one of the first.
        name = call.partition("(")[0]
        code = f"from veomni_hook.kernels.{self.op}.provenance import {name}\n\n{call}"
        comment = f"a user's {self.kind}_implementation is told from transformers' default"
        return Site(
            op=self.op,
            target=target,
            status=Status.ROUTED,
            reason=f"notes the user's {self.kind}_implementation",
            edits=insert(view, function, code, comment),
            counted=False,
            lineno=function.lineno,
        )

    def _setter_of(self, owner: ast.ClassDef) -> FunctionNode | None:
        """The setter of the property, if it stores the value and passes it to sub-configs."""
        for node in owner.body:
            if (
                isinstance(node, ast.FunctionDef)
                and [chain(decorator) for decorator in node.decorator_list] == [f"{node.name}.setter"]
                and node.name == self.property_name
                and len(node.args.args) == 2
                and self._assigns(node)
                and any(getattr(inner, "attr", "") == "sub_configs" for inner in walk_ast(node))
            ):
                return node
        return None

    def _is_request(self, function: FunctionNode) -> bool:
        """Whether the method stores its first argument and has no return statement."""
        returns = any(isinstance(node, ast.Return) for node in walk_ast(function))
        others = {argument.arg for argument in function.args.args[2:]}
        plain = len(function.args.args) >= 2 and others <= _OTHERS
        return plain and self._assigns(function) and not returns

    def _assigns(self, function: FunctionNode) -> bool:
        return any(
            isinstance(node, ast.Attribute) and node.attr == self.resolved and isinstance(node.ctx, ast.Store)
            for node in walk_ast(function)
        )


_SETTINGS = (_Setting("attention", "attn"), _Setting("moe_experts", "experts"))


def find(view: ModuleView) -> Iterator[Site]:
    """What sets the implementation of attention, then what sets that of experts."""
    for setting in _SETTINGS:
        yield from setting.sites(view)


def _two_parameters(function: FunctionNode) -> str:
    return ", ".join(argument.arg for argument in function.args.args[:2])
