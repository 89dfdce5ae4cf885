"""An idiom's view of a module."""

import ast

from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.edit import Edit
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


def view():
    return ModuleView(Document(SOURCE))


def test_every_method_then_every_function():
    methods = ["Base.__init__", "Base.shared", "Model.shared", "Model.forward"]
    assert [target for target, _, _ in view().every_method()] == methods
    found = [(target, owner.name if owner else "") for target, owner, _ in view().every_function()]
    functions = [("twice", ""), ("once", ""), ("plain", "")]
    assert found == [*((target, target.partition(".")[0]) for target in methods), *functions]


def test_a_class_overrides_what_it_inherits():
    module = view()
    found = module.inherited_methods(module.classes["Model"])
    assert found.keys() == {"__init__", "shared", "forward"}
    assert ast.unparse(found["shared"].body[0]) == "return 2"


def test_functions_whose_names_may_mean_something_else():
    module = view()
    reasons = {name: module.why_unclear(function) for name, function in module.functions.items()}
    assert reasons == {
        "twice": "it is not the only definition of its name",
        "once": "it is decorated with decorated",
        "plain": "",
    }


OBJECT = """\
class Base:
    def size(self): return self.scale

class Model(Base):
    def forward(self, x): return self.second(self.first(x)) + self.bias * self.size
    def first(self, x): return self.weight * x + self.config.offset
    def second(self, x): return self.first(x) + self.forward(x)
    def other(self): return self.table
"""


def test_a_method_and_those_that_it_uses_are_followed():
    module = ModuleView(Document(OBJECT))
    model = module.classes["Model"]
    forward = module.methods(model)["forward"]
    names = [method.name for method in module.followed(model, forward)]
    assert names[0] == "forward" and sorted(names) == ["first", "forward", "second", "size"]
    used = module.attributes_used(model, forward)
    assert used[0] == "bias" and sorted(used) == ["bias", "scale", "weight"]


def test_the_text_of_a_node_has_the_edits_inside_it():
    module = ModuleView(Document(OBJECT))
    first = module.methods(module.classes["Model"])["first"]
    start, at = OBJECT.index("self.weight"), OBJECT.index("self.bias")
    edits = [Edit(at, at, "none"), Edit(start, start + len("self.weight"), "1"), Edit(start, start, "0 + ")]
    assert module.edited(first, edits) == "def first(self, x): return 0 + 1 * x + self.config.offset"
