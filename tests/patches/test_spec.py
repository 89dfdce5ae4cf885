import subprocess
import sys

import pytest

from veomni_hook.patches.spec import (
    ImportSpec,
    Patch,
    PatchConfig,
    PatchType,
    PositionedHelper,
    SlotSpec,
    create_patch_from_external,
)


class Thing:
    pass


def function(self):
    pass


def config():
    return PatchConfig("pkg.upstream")


@pytest.mark.parametrize(
    ("verb", "target", "given", "kind"),
    [
        ("replace_class", "A", Thing, PatchType.CLASS_REPLACEMENT),
        ("replace_function", "f", function, PatchType.FUNCTION_REPLACEMENT),
        ("override_method", "A.m", function, PatchType.METHOD_OVERRIDE),
        ("add_method", "A.m", function, PatchType.METHOD_ADDITION),
        ("modify_init", "A", function, PatchType.INIT_MODIFICATION),
    ],
)
def test_verbs_work_as_decorator_and_directly(verb, target, given, kind):
    one, other = config(), config()
    assert getattr(one, verb)(target)(given) is given
    assert getattr(other, verb)(target, replacement=given) is given
    assert one.patches == other.patches == one.get_patches_for_target(target)
    patch = one.patches[0]
    assert (patch.patch_type, patch.target, patch.replacement) == (kind, target, given)
    assert patch.source_module == __name__
    assert patch.description


def test_surroundings():
    made = config()
    made.add_import("a", names=["b as c"])
    made.add_import("d", alias="e", is_from_import=False)
    made.drop_import_names("x", "y")
    made.add_post_import_block("z = 1")
    assert made.add_helper(function) is function
    assert made.add_helper()(Thing) is Thing
    assert made.add_helper_after("A")(function) is function
    assert made.add_helper_after("B", Thing) is Thing
    made.exclude_from_output("C", "D")
    assert made.additional_imports == [ImportSpec("a", ["b as c"]), ImportSpec("d", None, "e", False)]
    assert made.drop_imported_names == {"x", "y"}
    assert made.post_import_blocks == ["z = 1"]
    assert made.helpers == [function, Thing]
    assert made.positioned_helpers == [PositionedHelper("A", function), PositionedHelper("B", Thing)]
    assert made.exclude == ["C", "D"]


def test_inherit_takes_what_it_is_told():
    base, some, everything = config(), config(), config()
    base.add_helper(function)
    base.add_import("a")
    base.add_post_import_block("b")
    base.drop_import_names("c")
    base.modify_init("A", function)
    base.override_method("A.m", function)
    base.add_slot("s", op="o", variant="v")
    some.inherit(base, helpers=False, blocks=False)
    assert (some.helpers, some.slots, some.post_import_blocks, some.patches) == ([], [], [], [])
    assert (some.additional_imports, some.drop_imported_names) == ([ImportSpec("a")], {"c"})
    everything.inherit(base, init_modifications=True)
    assert everything.helpers == [function]
    assert everything.slots == [SlotSpec("s", "o", "v")]
    assert [patch.patch_type for patch in everything.patches] == [PatchType.INIT_MODIFICATION]
    everything.helpers.clear()
    assert base.helpers == [function]


def test_slot_handle_names_itself_when_it_is_used_in_the_config():
    made = config()
    slot = made.add_slot("rms_slot", op="rms_norm", variant="weight")
    with pytest.raises(AttributeError, match="rms_slot"):
        slot.kernel(None)
    with pytest.raises(TypeError, match="rms_slot"):
        slot()


@pytest.mark.parametrize(
    ("file", "given", "expected"),
    [
        ("x_gpu.py", None, "gpu"),
        ("x_npu.py", None, "npu"),
        ("x_npu.py", "gpu", "gpu"),
    ],
)
def test_device(file, given, expected):
    assert PatchConfig("m", file, device=given).device == expected


def test_a_config_knows_where_it_was_made(load):
    module = load("\n\nother = PatchConfig('m')\n")
    assert module.other.name == f"{module.__name__}:other"
    assert module.other.origin == f"{module.__file__}:5"


def test_external_patch():
    patch = create_patch_from_external("A", "pkg.mod", "B")
    assert patch == Patch(
        PatchType.CLASS_REPLACEMENT,
        "A",
        None,
        source_module="pkg.mod",
        description="Replace A with B from pkg.mod",
        replacement_source="pkg.mod.B",
    )
    made = config()
    assert made.add_patch(patch) is patch
    assert made.get_class_replacements() == {"A": patch}


def test_getters():
    made = config()
    made.override_method("A.m", function)
    made.replace_function("f", function)
    made.modify_init("A", function)
    assert list(made.get_method_overrides()) == ["A.m"]
    assert list(made.get_function_replacements()) == ["f"]
    assert list(made.get_init_modifications()) == ["A"]
    assert [patch.target for patch in made.get_patches_for_target("A")] == ["A.m", "A"]


def test_importing_the_language_loads_no_engine():
    code = "import sys, veomni_hook.patches.spec; print(*sorted(m.split('.')[-1] for m in sys.modules if 'patches.' in m))"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "mappings reasons records site spec"
