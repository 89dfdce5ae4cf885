"""Where something is declared: the line of the decorator, of the call, or of the function."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from veomni_hook.errors import PatchConflictError, PatchError
from veomni_hook.patches.adopt import adopt

UPSTREAM = "import os\n\n\nclass A:\n    def f(self, x):\n        return x\n"

CODE = """\
@config.override_method(
    "A.f",
    description="two lines more",
)
def f(self, x):
    return x


def g(self, x):
    return x


config.override_method("A.g", g)
config.rewrite(
    "A.f",
    pattern="{x} + 1",
    replacement="{x}",
)
config.add_import("json", ["dumps"])
config.drop_import_names(
    "os",
)
config.exclude_from_output("A", "B")
config.add_post_import_block("X = 1")
patch = config.add_patch(create_patch_from_external("A", "collections", "OrderedDict"))


@config.add_helper
def helper():
    pass
"""


def test_every_declaration_knows_its_line(load):
    module = load(CODE)
    config, first = module.config, 3  # below the two lines of HEAD

    def line(declared: object) -> int:
        file, _, number = config.place_of(declared).rpartition(":")
        assert file == module.__file__
        return int(number) - first

    assert [line(patch) for patch in config.patches] == [0, 12, 13, 24]
    assert line(config.additional_imports[0]) == 18
    assert [line(name) for name in ("os", "A", "B", "X = 1")] == [19, 22, 22, 23]
    assert line(module.helper) == 27, "its decorator's"
    assert config.origin == f"{module.__file__}:2" and config.place_of(object()) == config.origin


def test_what_is_inherited_keeps_its_line(load):
    base = load("config.add_post_import_block('X = 1')\n").config
    module = load("config.add_post_import_block('Y = 1')\n")
    module.config.inherit(base)
    assert module.config.place_of("X = 1") == base.place_of("X = 1") != module.config.place_of("Y = 1")


def test_errors_name_the_line(load, patched):
    code = "\n\n@config.override_method('A.h')\ndef h(self): pass\n"
    with pytest.raises(PatchError) as caught:
        patched(UPSTREAM, code)
    assert re.search(
        r"; declared in \S+config_of_test_\d+\.py:5 \(config_of_test_\d+:config\)$", caught.value.where
    )
    twice = "@config.override_method('A.f')\ndef f(self, x): pass\n"
    with pytest.raises(PatchConflictError) as conflict:
        patched(UPSTREAM, twice, f"\n{twice}")
    assert re.search(
        r"; declared in \S+\.py:3 \(\S+\) and declared in \S+\.py:4 \(\S+\)$", conflict.value.where
    )
    with pytest.raises(PatchError) as unused:
        patched(UPSTREAM, "\nconfig.exclude_from_output('Absent')\n")
    assert re.search(r"\.py:4 \(", unused.value.where)


def test_a_patch_of_patchgens_has_the_line_of_its_function():
    def f(self: Any) -> None:
        pass

    class PatchConfig(SimpleNamespace):
        pass

    patch = SimpleNamespace(patch_type="method_override", target="A.f", replacement=f)
    theirs = PatchConfig(
        source_module="m", patches=[patch], additional_imports=[], helpers=[], exclude=["A"],
        target_file="x.py",
    )  # fmt: skip
    config = adopt(theirs)
    assert config.place_of(config.patches[0]) == f"{__file__}:{f.__code__.co_firstlineno}"
    assert config.place_of("A") == config.origin
