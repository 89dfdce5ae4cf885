import inspect
import typing
from typing import Any

import pytest

from veomni_hook.errors import PatchTargetError, ReplacementError, SignatureError

UPSTREAM = '''\
from dataclasses import dataclass


class Root:
    def __init__(self, config, layer_idx: "int" = 0):
        """Upstream's."""
        self.config = config
        self.layer_idx = layer_idx


class Child(Root):
    def __init__(self, config, layer_idx: "int" = 0, **kwargs):
        """Child's."""
        super().__init__(config, layer_idx)
        self.kwargs = kwargs  # kept

    def other(self): return self


class Heir(Child): pass
class Bare: pass
class BareHeir(Bare):
    x = 1


@dataclass
class Data(Root):
    x: int = 1
'''

MODIFY = """
    # Patch.1: bound
    @config.modify_init("{target}")
    def bind(original_init, self, config, *args, **kwargs):
        # before
        original_init(self, config, *args, **kwargs)
        self.bound = config
        super().__setattr__("own", self)
"""


def test_upstream_init_stays_and_runs_inside(patched, run):
    result = patched(UPSTREAM, MODIFY.format(target="Child"))
    child = run(result)["Child"]("c", 3, extra=1)
    assert vars(child) == {"config": "c", "layer_idx": 3, "kwargs": {"extra": 1}, "bound": "c", "own": child}
    before, after = result.plain.split("    # Patch.1: bound\n")
    assert UPSTREAM.startswith(before.rstrip("\n"))
    assert UPSTREAM.endswith(after.split("del _modify_init\n")[1])


def test_new_init_says_of_itself_what_the_original_says(patched, run):
    original: dict[str, Any] = {"__name__": "m"}
    exec(compile(UPSTREAM, "m", "exec", dont_inherit=True), original)
    module = run(patched(UPSTREAM, MODIFY.format(target="Child")))
    old, new = original["Child"].__init__, module["Child"].__init__
    assert inspect.signature(new) == inspect.signature(old)
    assert inspect.signature(module["Child"]) == inspect.signature(original["Child"])
    assert (new.__doc__, new.__name__, new.__qualname__) == (old.__doc__, old.__name__, old.__qualname__)
    assert typing.get_type_hints(new) == typing.get_type_hints(old) == {"layer_idx": int}
    assert not hasattr(module["Child"], "_modify_init")


def test_inherited_init(patched, run):
    original: dict[str, Any] = {"__name__": "m"}
    exec(compile(UPSTREAM, "m", "exec", dont_inherit=True), original)
    module = run(patched(UPSTREAM, MODIFY.format(target="Heir")))
    heir = module["Heir"]("c", layer_idx=2)
    assert (heir.config, heir.layer_idx, heir.bound) == ("c", 2, "c")
    assert inspect.signature(module["Heir"]) == inspect.signature(original["Heir"])
    assert not hasattr(module["Child"]("c"), "bound")


def test_added_init_is_the_one_that_is_modified(patched, run):
    code = (
        MODIFY.format(target="Heir")
        + """
    @config.add_method("Heir.__init__")
    def init(self, config):
        self.added = True
    """
    )
    heir = run(patched(UPSTREAM, code))["Heir"]("c")
    assert (heir.added, heir.bound, hasattr(heir, "config")) == (True, "c", False)


def test_init_in_a_branch(patched, run):
    upstream = "class A:\n    if 1:\n        def __init__(self, config): self.c = config\n    x = 1\n"
    made = run(patched(upstream, MODIFY.format(target="A")))["A"](1)
    assert (made.c, made.bound, made.x) == (1, 1, 1)


@pytest.mark.parametrize("target", ["BareHeir", "Data", "Chld"])
def test_classes_without_init_to_modify(patched, target):
    with pytest.raises(PatchTargetError) as caught:
        patched(UPSTREAM, MODIFY.format(target=target))
    assert caught.value.target == target
    assert "Child" in caught.value.nearest or target != "Chld"


@pytest.mark.parametrize(
    "function",
    [
        "def f(): pass",
        "def f(original_init, /, self): original_init(self)",
        "def f(original_init, self, config, layer_idx=0, **kwargs): self.x = 1",
        "async def f(original_init, self): original_init(self)",
        "class f: pass",
    ],
)
def test_functions_of_another_form(patched, function):
    with pytest.raises(ReplacementError, match="original_init, self"):
        patched(UPSTREAM, f"@config.modify_init('Child')\n{function}\n")


def test_dropped_parameters(patched):
    with pytest.raises(SignatureError, match="layer_idx"):
        patched(
            UPSTREAM,
            "@config.modify_init('Child')\ndef f(original_init, self, config): original_init(self)\n",
        )
