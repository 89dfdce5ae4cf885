"""Processing and configuration modules: targets where a config names them, and nowhere else."""

import pytest

from tests.finders.conftest import calls_of
from veomni_hook.finders.config_text import named_by
from veomni_hook.finders.finder import PatchFinder
from veomni_hook.finders.state import STATE
from veomni_hook.finders.targets import is_target, is_target_if_named

BOTH = """
import json, sys, veomni_hook.install
from transformers.models.tiny.processing_tiny import TinyProcessor
from transformers.models.tiny.configuration_tiny import TinyConfig
"""
RESULT = 'print(json.dumps([TinyProcessor()(), getattr(TinyConfig, "kind", None) is not None]))'


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("transformers.models.qwen3.configuration_qwen3", True),
        ("transformers.models.clip.processing_clip", True),
        ("transformers.models.clip.image_processing_clip", False),
        ("trl.trainer.utils", False),
        ("transformers.models.qwen3.modeling_qwen3", False),
        ("transformers.configuration_utils", False),
        ("transformers.processing_utils", False),
    ],
)
def test_which_modules_a_config_may_name(name, expected):
    assert is_target_if_named(name) is expected
    assert not (expected and is_target(name))


def test_they_are_patched_where_a_config_names_them(python):
    ran = python(BOTH + RESULT, VEOMNI_PATCHES="processing_config")
    assert ran.result == ["nothing", True] and not ran.err
    modules = "veomni_hook.install.handle.status().modules.items()"
    outcomes = f"print(json.dumps({{n.rsplit('.', 1)[1]: o.cache for n, o in {modules} if o.patched}}))"
    again = python(BOTH + outcomes, VEOMNI_PATCHES="processing_config")
    assert again.result == {"processing_tiny": "hit", "configuration_tiny": "hit"}


def test_nothing_is_asked_where_none_does(python):
    brought = "[n for n in sys.modules if n.startswith('veomni_hook.cache')]"
    show = f"from veomni_hook.finders.state import STATE; print(json.dumps([{brought}, sorted(STATE.asked), STATE.store is None]))"
    for patches in ("tiny_config", None):
        assert python(BOTH + RESULT, VEOMNI_PATCHES=patches).result == ["none", False]
        assert python(BOTH + show, VEOMNI_PATCHES=patches).result == [[], [], True]


def test_a_registered_config_applies(python):
    register = "import veomni_hook, processing_config; veomni_hook.register(processing_config.config)\n"
    assert python(register + BOTH + RESULT, VEOMNI_PATCHES=None).result == ["nothing", False]


@pytest.mark.parametrize("first", [True, False])
def test_each_activation_has_its_configs(python, *, first):
    code = f"""
import json, sys, veomni_hook
patches = [{{}}, {{"patches": ["processing_config"]}}]
with veomni_hook.activate(**patches[{first:d}]):
    from transformers.models.tiny.configuration_tiny import TinyConfig
with veomni_hook.activate(**patches[{not first:d}]):
    from transformers.models.tiny.processing_tiny import TinyProcessor
"""
    expected = ["none", True] if first else ["nothing", False]
    assert python(code + RESULT, VEOMNI_PATCHES=None).result == expected


def test_those_imported_too_early_are_reported(python):
    code = """
import json, warnings
from transformers.models.tiny import processing_tiny, configuration_tiny
with warnings.catch_warnings(record=True) as given:
    warnings.simplefilter("always")
    import veomni_hook.install
print(json.dumps([[str(each.message) for each in given], sorted(veomni_hook.install.handle.status().modules)]))
"""
    said, modules = python(code, VEOMNI_PATCHES="processing_config").result
    (message,) = set(said)
    assert "imported too early to be patched: tiny" in message
    names = ["configuration_tiny", "processing_tiny"]
    assert [name.rpartition(".")[2] for name in modules] == names
    assert python(code, VEOMNI_PATCHES="tiny_config").result == [[], []]


def test_a_name_that_the_text_does_not_show_is_a_warning(python):
    code = BOTH + "import transformers.models.tiny.modeling_tiny\n" + RESULT
    ran = python(code, VEOMNI_PATCHES="computed_config")
    assert ran.result == ["none", False]
    assert "transformers.models.tiny.processing_tiny is patched only where the text" in ran.err


def test_what_a_text_names(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("configs")
    monkeypatch.syspath_prepend(folder)
    (folder / "of_a_text.py").write_text(
        "from veomni_hook import PatchConfig\nfrom others_of_a_text import config as other\n"
        "from transformers.models.x.configuration_x import X\n"
        "config = PatchConfig('transformers.models.x.processing_x')\n"
        'configs = [PatchConfig("transformers.models.*.modeling_*"), other, PatchConfig("transformers.models.y*")]\n'
    )
    (folder / "others_of_a_text.py").write_text(
        'config = PatchConfig("transformers.models.[ab]*.configuration_*")\n'
    )
    expected = {
        "transformers.models.x.processing_x",
        "transformers.models.y*",
        "transformers.models.[ab]*.configuration_*",
    }
    assert named_by("of_a_text") == named_by("of_a_text:config") == expected
    assert named_by("absent_of_a_text") == set()


def test_a_module_that_no_config_names_costs_a_few_calls(monkeypatch):
    finder = PatchFinder()
    monkeypatch.setattr(STATE, "named", frozenset())
    name = "transformers.models.qwen3.configuration_qwen3"
    assert finder.find_spec(name) is None and calls_of(lambda: finder.find_spec(name)) <= 5
