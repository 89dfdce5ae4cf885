"""An idiom's view of a module."""

from __future__ import annotations

import ast

from veomni_hook.patches.code.document import Document
from veomni_hook.patches.routes.view import ModuleView

SOURCE = """\
class Base:
    def __init__(self): pass
    def shared(self): return 1

class Model(Base):
    def shared(self): return 2
    async def forward(self): pass

def twice(): pass
def twice(): pass
@decorated
def once(): pass
def plain(): pass
"""


def view() -> ModuleView:
    return ModuleView(Document(SOURCE))


def test_every_method_then_every_function() -> None:
    methods = ["Base.__init__", "Base.shared", "Model.shared", "Model.forward"]
    assert [target for target, _, _ in view().every_method()] == methods
    found = [(target, owner.name if owner else "") for target, owner, _ in view().every_function()]
    functions = [("twice", ""), ("once", ""), ("plain", "")]
    assert found == [*((target, target.partition(".")[0]) for target in methods), *functions]


def test_a_class_overrides_what_it_inherits() -> None:
    module = view()
    found = module.inherited_methods(module.classes["Model"])
    assert found.keys() == {"__init__", "shared", "forward"}
    assert ast.unparse(found["shared"].body[0]) == "return 2"


def test_functions_whose_names_may_mean_something_else() -> None:
    module = view()
    reasons = {name: module.why_unclear(function) for name, function in module.functions.items()}
    assert reasons == {
        "twice": "it is not the only definition of its name",
        "once": "it is decorated with decorated",
        "plain": "",
    }
