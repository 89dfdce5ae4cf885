import pytest

from tests.patches.idioms.applied import changed, executed, sites_of
from veomni_hook.kernels.moe_experts import provenance
from veomni_hook.patches.idioms import implementations
from veomni_hook.patches.site import Status

CONFIG = '''
class Settings:
    sub_configs = {}
    _experts_implementation_internal = None

    @property
    def _experts_implementation(self):
        return self._experts_implementation_internal

    @_experts_implementation.setter
    def _experts_implementation(self, value):
        """Set it."""
        self._experts_implementation_internal = value
        for key in self.sub_configs:
            getattr(self, key)._experts_implementation = value

    def _remove_keys_not_serialized(self, entries):
        for key in ("_experts_implementation_internal",):
            entries.pop(key, None)
'''

MODEL = """
class Model:
    def set_experts_implementation(self, wanted):
        if wanted == "wrong":
            raise ValueError(wanted)
        if wanted != self.config._experts_implementation:
            self.config._experts_implementation_internal = wanted

    def after(self):
        return 1
"""


def test_finds_the_config_and_the_model():
    assert [site.target for site in sites_of(implementations, CONFIG + MODEL)] == [
        "Settings._experts_implementation.setter",
        "Settings._remove_keys_not_serialized",
        "Model.set_experts_implementation",
    ]
    for site in sites_of(implementations, CONFIG + MODEL):
        assert (site.op, site.status, site.counted, site.slots) == ("moe_experts", Status.ROUTED, False, ())


def test_what_is_assigned_is_noted_and_not_saved():
    config = executed(CONFIG, sites_of(implementations, CONFIG))["Settings"]()
    assert vars(config) == {}
    config._experts_implementation = "eager"
    assert config._experts_implementation == "eager"
    noted = set(vars(config)) - {"_experts_implementation_internal"}
    assert len(noted) == 1
    entries = dict(vars(config), other=1)
    config._remove_keys_not_serialized(entries)
    assert entries == {"other": 1}
    config._experts_implementation = None
    assert set(vars(config)) == {"_experts_implementation_internal"}


def test_a_request_is_noted_when_it_was_granted(monkeypatch):
    noted = []
    monkeypatch.setattr(provenance, "note_request", lambda model, wanted: noted.append(wanted))
    scope = executed(CONFIG + MODEL, sites_of(implementations, CONFIG + MODEL))
    model = scope["Model"]()
    model.config = scope["Settings"]()
    with pytest.raises(ValueError):
        model.set_experts_implementation("wrong")
    assert noted == []
    model.set_experts_implementation("eager")
    model.set_experts_implementation("eager")
    assert noted == ["eager", "eager"]
    assert model.after() == 1


@pytest.mark.parametrize(
    ("source", "old", "new"),
    [
        (CONFIG, "_remove_keys_not_serialized", "_remove_some_keys"),
        (CONFIG, "self._experts_implementation_internal = value", "self._kept = value"),
        (CONFIG, "self.sub_configs", "self.parts"),
        (CONFIG, "def _experts_implementation(self, value)", "def _experts_implementation(self, value, more=1)"),
        (MODEL, "self.config._experts_implementation_internal = wanted", "self.config.kept = wanted"),
        (MODEL, "            raise ValueError(wanted)", "            return"),
        (MODEL, "self, wanted", "self, wanted, more=None"),
    ],
)  # fmt: skip
def test_what_is_built_differently_is_left_alone(source, old, new):
    assert sites_of(implementations, source)
    assert sites_of(implementations, changed(source, (old, new))) == []
