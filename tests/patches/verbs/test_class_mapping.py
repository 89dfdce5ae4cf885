import importlib.util
import re
import sys
import threading
from types import SimpleNamespace

import pytest
from torch import nn

from veomni_hook.errors import (
    ConfigError,
    PatchConflictError,
    PatchTargetError,
    ReplacementError,
    SignatureError,
)
from veomni_hook.patches import mapped, mappings
from veomni_hook.patches.engine import Origin, patch_source
from veomni_hook.patches.spec import PatchConfig

UPSTREAM = """\
from torch import nn

class Norm(nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()

class MLP(nn.Module):
    pass

class BigMLP(MLP):
    pass

class Layer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm, self.other = Norm(size), [Norm(size, eps=1)][0]
        self.mlp, self.big = MLP(), BigMLP()

class Model(nn.Module):
    _no_split_modules = ["Norm", "Layer"]
    _can_record_outputs = {"norms": Norm, "both": [Layer, Norm]}

    def init(self, module):
        return isinstance(module, Norm)
"""


class Own(nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.size = size


class Second(Own):
    pass


class Other(nn.Module):
    def __init__(self):
        super().__init__()


def function(size, eps=0):
    return None


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """This test module can be imported by name, as the module of replacements has to be."""
    monkeypatch.setitem(sys.modules, "replacements_of_test", sys.modules[__name__])
    before = dict(mapped.MAPPED)
    mapped.set_active(active=True)  # a test in front of this one may have switched the hook off
    yield
    mapped.MAPPED.clear()
    mapped.MAPPED.update(before)
    mappings.CHANGED.clear()
    mapped.set_active(active=True)


def config_for(*mappings, source="pkg.up", **options):
    config = PatchConfig(source, label="conf:config")
    for target, name in mappings:
        config.map_class(target, f"replacements_of_test:{name}", **options)
    return config


def patched(*configs, upstream=UPSTREAM):
    return patch_source(upstream, configs, Origin("pkg.up", "/up.py", "pkg", "1"))


def loaded(result, monkeypatch):
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("pkg.up", None))
    monkeypatch.setitem(sys.modules, "pkg.up", module)
    exec(compile(result.text, "up.py", "exec"), vars(module))
    return module


def test_every_constructor_call_gets_the_replacement_and_the_class_stays(monkeypatch):
    home = loaded(patched(config_for(("Norm", "Own"))), monkeypatch)
    layer = home.Layer(4)
    assert type(layer.norm) is type(layer.other) is Own and layer.norm.size == 4
    assert type(layer.mlp) is home.MLP and isinstance(home.Norm(4), nn.Module) and home.Norm is not Own
    assert home.Model().init(home.Norm(4)) and not home.Model().init(layer.norm)


RENAMED = """\
from torch import nn
from pkg.tools import renames

class Attention(nn.Module):
    def forward(self, x, cache=None, **kwargs):
        return x

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    @renames("memory", "5.40.0", new_name="cache")
    def forward(self, x, cache=None):
        return self.attention(x, cache=cache)
"""


class Forgetful(nn.Module):
    def forward(self, x, memory=None, **kwargs):
        return x


class Careful(nn.Module):
    def forward(self, x, cache=None, memory=None):
        return x


def test_a_forward_with_the_earlier_name_of_a_parameter_is_refused(monkeypatch):
    tools = SimpleNamespace(renames=lambda *names, **more: lambda function: function)
    monkeypatch.setitem(sys.modules, "pkg.tools", tools)
    home = loaded(patched(config_for(("Attention", "Forgetful")), upstream=RENAMED), monkeypatch)
    with pytest.raises(SignatureError, match="takes memory, which is cache in this release") as caught:
        home.Model()
    assert "to cache, or take both" in str(caught.value)
    home = loaded(patched(config_for(("Attention", "Careful")), upstream=RENAMED), monkeypatch)
    assert type(home.Model().attention) is Careful


def test_records_of_outputs_and_names_that_are_not_split_know_the_replacement(monkeypatch):
    home = loaded(patched(config_for(("Norm", "Own"))), monkeypatch)
    own, upstream = home.Layer(4).norm, home.Norm(4)
    recorded = home.Model._can_record_outputs
    either = recorded["norms"]
    assert isinstance(own, either) and isinstance(upstream, either) and not isinstance(nn.ReLU(), either)
    assert recorded["both"][0] is home.Layer and isinstance(own, recorded["both"][1])
    assert either.__name__ == "Norm" and isinstance(either, type)
    assert home.Model._no_split_modules == ["Norm", "Own", "Layer"]


def test_names_have_precedence_over_expressions_and_earlier_ones_over_later_ones(monkeypatch):
    config = config_for((re.compile("MLP$"), "Other"), (re.compile("Big|Norm"), "Own"), ("MLP", "Never"))
    config.unmap_class("MLP")
    config.map_class("BigMLP", "torch.nn:Identity")
    result = patched(config)
    layer = loaded(result, monkeypatch).Layer(4)
    assert [type(layer.norm), type(layer.mlp), type(layer.big)] == [Own, Other, nn.Identity]
    assert {(one.target, one.config) for one in result.report.yielded} == {("BigMLP", "conf:config")}
    assert [(one.target, one.declared) for one in result.report.applied] == [
        ("MLP", "MLP$"), ("Norm", "Big|Norm"), ("BigMLP", "")
    ]  # fmt: skip
    with pytest.raises(PatchConflictError, match="same target"):
        patched(config_for(("Norm", "Own")), config_for(("Norm", "Other")))


def test_a_pattern_of_modules_maps_where_the_class_is():
    everywhere = config_for(("*Norm", "Own"), (re.compile("^Absent"), "Own"), source="pkg.*")
    assert [one.target for one in patched(everywhere).report.applied] == ["Norm"]
    assert patched(everywhere, upstream="class Absent:\n    pass\n").report.applied == ()


def test_the_replacement_may_subclass_the_class_that_it_replaces(monkeypatch, tmp_path):
    (tmp_path / "subclass_of_test.py").write_text(
        "from pkg.up import Norm\n\nclass Sub(Norm):\n"
        "    def __init__(self, size, eps=0):\n        super().__init__(size, eps)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = PatchConfig("pkg.up")
    config.map_class("Norm", "subclass_of_test:Sub")
    home = loaded(patched(config), monkeypatch)
    assert "subclass_of_test" not in sys.modules
    try:
        assert type(home.Layer(4).norm).__mro__[1] is home.Norm
    finally:
        sys.modules.pop("subclass_of_test", None)


def test_switched_off_in_a_block_a_thread_and_by_unmapping(monkeypatch):
    config = config_for(("Norm", "Own"), ("MLP", "Other"))
    home = loaded(patched(config), monkeypatch)
    with mapped.use_mapped_classes(on=False):
        assert type(home.Layer(4).norm) is home.Norm
        found = []
        thread = threading.Thread(target=lambda: found.append(type(home.Layer(4).norm)))
        thread.start()
        thread.join()
        assert found == [Own]
        with mapped.use_mapped_classes(on=True):
            assert type(home.Layer(4).norm) is Own
    mapped.set_active(active=False)
    assert type(home.Layer(4).norm) is home.Norm
    mapped.set_active(active=True)
    config.unmap_class("Norm")
    layer = home.Layer(4)
    assert type(layer.norm) is home.Norm and type(layer.mlp) is Other
    config.map_class("Norm", "replacements_of_test:Own")
    assert type(home.Layer(4).norm) is Own
    with pytest.raises(ConfigError, match="maps no class as 'Nrm'"):
        config.unmap_class("Nrm")


def test_a_class_mapped_anew_gets_the_new_replacement_and_existing_models_keep_theirs(monkeypatch):
    monkeypatch.setattr(mapped, "serve_conversions", lambda: None)
    config = config_for(("Norm", "Own"), weights="replacements_of_test:first")
    home = loaded(patched(config), monkeypatch)
    before = home.Layer(4)
    config.unmap_class("Norm")
    config.map_class("Norm", "replacements_of_test:Second", weights="replacements_of_test:second")
    after = home.Layer(4)
    assert [type(before.norm), type(after.norm)] == [Own, Second]
    assert [one.weights for one in mapped.loaded_instances(before)] == ["replacements_of_test:first"]
    assert [one.weights for one in mapped.loaded_instances(after)] == ["replacements_of_test:second"]
    recorded = home.Model._can_record_outputs["norms"]
    assert isinstance(before.norm, recorded) and isinstance(after.norm, recorded)
    assert set(home.Model._no_split_modules) == {"Norm", "Own", "Second", "Layer"}
    config.unmap_class("Norm")
    config.map_class("Norm", "replacements_of_test:Own")
    assert [one.weights for one in mapped.loaded_instances(before)] == [""], "the same class, declared anew"
    assert type(home.Layer(4).norm) is Own


def test_an_expression_takes_over_when_a_name_is_unmapped(monkeypatch):
    config = config_for(("Norm", "Own"), (re.compile("Norm$"), "Second"), (re.compile("^N"), "Other"))
    home = loaded(patched(config), monkeypatch)
    config.unmap_class("Norm")
    assert type(home.Layer(4).norm) is Second
    config.map_class("Norm", "replacements_of_test:Own")
    assert type(home.Layer(4).norm) is Own
    for target in ("Norm", re.compile("Norm$"), re.compile("^N")):
        config.unmap_class(target)
    assert type(home.Layer(4).norm) is home.Norm


def test_a_module_from_the_cache_follows_what_its_config_has_taken_back(monkeypatch):
    config = config_for(("Norm", "Own"), ("MLP", "Other"))
    stored = patched(config)
    config.unmap_class("Norm")
    config.unmap_class("MLP")
    config.map_class("Norm", "replacements_of_test:Second")
    home = loaded(stored, monkeypatch)
    layer = home.Layer(4)
    assert type(layer.norm) is Second and type(layer.mlp) is home.MLP
    assert set(home.Model._no_split_modules) == {"Norm", "Own", "Second", "Layer"}
    config_for(("Norm", "Own"))  # another config with the same name, as when a cell of a notebook runs again
    assert type(loaded(stored, monkeypatch).Layer(4).norm) is Own


def test_a_config_module_executed_late_declares_one_by_one(monkeypatch):
    home = loaded(patched(config_for(("Norm", "Own"), ("MLP", "Other"))), monkeypatch)
    config_for(("Norm", "Own"))
    layer = home.Layer(4)
    assert type(layer.norm) is Own and type(layer.mlp) is Other


def test_a_class_that_someone_else_has_put_there_wins(monkeypatch):
    home = loaded(patched(config_for(("Norm", "Own"))), monkeypatch)
    upstream, home.Norm = home.Norm, type("Theirs", (home.Norm,), {})
    assert type(home.Layer(4).norm).__name__ == "Theirs"
    assert mapped.MAPPED["pkg.up", "Norm"].gave_way is home.Norm
    home.Norm = upstream
    assert type(home.Layer(4).norm) is Own


@pytest.mark.parametrize(
    ("target", "name", "error", "said"),
    [
        ("Nrm", "Own", PatchTargetError, "there is no class Nrm"),
        (re.compile("^Nrm"), "Own", PatchTargetError, r"no class .* '\^Nrm'[^$]*nearest class names: Norm"),
        ("Model", "Own", PatchTargetError, "never constructs Model"),
        ("Norm", "Missing", ReplacementError, "has no Missing"),
    ],
)
def test_wrong_declarations(target, name, error, said):
    with pytest.raises(error, match=said):
        patched(config_for((target, name)))


@pytest.mark.parametrize("line", ["TABLE = {'a': Norm}", "made = Norm._from_config(1)"])
def test_a_class_that_is_constructed_from_elsewhere(line):
    with pytest.raises(PatchTargetError, match="keeps Norm elsewhere"):
        patched(config_for(("Norm", "Own")), upstream=f"{UPSTREAM}\n{line}\n")


@pytest.mark.parametrize(
    "text",
    [
        "Own",
        "pkg:a.b",
        ":Own",
    ],
)
def test_names_without_a_module(text):
    with pytest.raises(ConfigError, match=r"not of the form package\.module:Name"):
        PatchConfig("pkg.up").map_class("Norm", text)


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("NotYet", ReplacementError, "no subclass of torch.nn.Module"),
        ("Other", SignatureError, "cannot be constructed as Norm is: too many positional arguments"),
        ("Gone", ReplacementError, "cannot be imported: AttributeError"),
    ],
)
def test_wrong_replacements_fail_where_a_model_is_built(name, error, said, monkeypatch):
    for replaced in ("Gone", "NotYet"):
        monkeypatch.setattr(sys.modules[__name__], replaced, Own, raising=False)
    home = loaded(patched(config_for(("Norm", name))), monkeypatch)
    monkeypatch.delattr(sys.modules[__name__], "Gone")
    monkeypatch.setattr(sys.modules[__name__], "NotYet", len)
    with pytest.raises(error, match=said) as caught:
        home.Layer(4)
    assert "declared in conf:config: map_class('Norm')" in caught.value.where


def test_a_known_replacement_is_checked_where_it_is_declared():
    for given in ("replacements_of_test:function", function, int):
        with pytest.raises(ConfigError, match=r"no subclass of torch\.nn\.Module"):
            PatchConfig("pkg.up").map_class("Norm", given)
    with pytest.raises(ConfigError, match="no subclass"):
        PatchConfig("pkg.up").map_class("Norm")(function)
    PatchConfig("pkg.up").map_class("Norm", "not.imported:Yet")


@pytest.mark.parametrize("target", ["Norm", re.compile("Norm$")])
def test_a_target_that_is_mapped_twice_is_an_error_unless_it_is_overwritten(monkeypatch, target):
    config = config_for((target, "Own"))
    home = loaded(patched(config), monkeypatch)
    with pytest.raises(
        ConfigError, match=r"twice, to replacements_of_test\.Own and to replacements_of_test:Second"
    ):
        config.map_class(target, "replacements_of_test:Second")
    assert type(home.Layer(4).norm) is Own
    config.map_class(target, "replacements_of_test:Second", overwrite=True)
    assert type(home.Layer(4).norm) is Second
    assert type(loaded(patched(config), monkeypatch).Layer(4).norm) is Second


def test_what_is_mapped_can_be_asked_for_and_cleared(monkeypatch):
    config = config_for(("Norm", "Own"), (re.compile("MLP$"), "Other"))
    assert config.mapped_classes == {"Norm": "replacements_of_test:Own", "MLP$": "replacements_of_test:Other"}
    home = loaded(patched(config), monkeypatch)
    config.unmap_class()
    assert config.mapped_classes == {}
    layer = home.Layer(4)
    assert type(layer.norm) is home.Norm and type(layer.mlp) is home.MLP
    config.unmap_class()  # nothing is left, which is no error
