from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.routes.config import routes
from veomni_hook.patches.site import Site, Status
from veomni_hook.patches.spec import SlotSpec
from veomni_hook.patches.steps import patch_steps, surroundings

DOCUMENT = Document("import os\n\n\ndef f(x):\n    return x\n", "pkg.upstream")
CODE = """
    config.add_import('a')
    config.add_post_import_block('X = 1')
    config.add_post_import_block('   ')
    config.add_slot('s', op='o', variant='v')
    config.exclude_from_output('f', 'f')
    config.drop_import_names('os')
    @config.add_helper
    def h(): pass
    @config.add_helper_after('f')
    def g(): pass
    @config.replace_function('f')
    def r(x): return x
"""


def test_what_a_config_declares_in_its_order(load):
    config = load(CODE).config
    steps = list(patch_steps(config, DOCUMENT))
    assert [(step.kind, step.target) for step in steps] == [("function_replacement", "f"), ("exclude", "f")]
    around = list(surroundings(config, steps, DOCUMENT))
    assert [(step.kind, step.target) for step in around] == [
        ("additional_import", "a"),
        ("slot", "s"),
        ("post_import_block", "X = 1"),
        ("helper", "h"),
        ("helper", "g"),
        ("drop_import", "os"),
    ]
    assert [step.kind for step in surroundings(config, [], DOCUMENT)] == [step.kind for step in around]


def test_routes_bring_the_slots_that_are_asked():
    slots = [SlotSpec(f"veomni_o_{name}", "o", name) for name in "ab"]
    sites = [
        Site("o", "f", Status.ROUTED, slot.variant, edits=(Edit(0, 0, ""),), slots=(slot,)) for slot in slots
    ]
    config = routes(sites, "pkg.upstream")
    assert config is not None
    first, second = patch_steps(config, DOCUMENT)
    assert [step.payload for step in surroundings(config, [first, second], DOCUMENT)] == slots
    assert [step.payload for step in surroundings(config, [second], DOCUMENT)] == slots[1:]
    assert list(surroundings(config, [], DOCUMENT)) == []
    assert str(first) == "route o/a of f"
