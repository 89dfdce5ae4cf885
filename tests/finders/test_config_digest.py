"""What a cached entry depends on besides upstream: files of configs, digests of registered ones."""

from __future__ import annotations

import pytest

from veomni_hook import PatchConfig, create_patch_from_external
from veomni_hook.finders.config_digest import config_digest

TINY = "transformers.models.tiny.modeling_tiny"


def function(body):
    def one(x: int) -> int:
        return x + 1

    def other(x: int) -> int:
        return x + 2

    found = one if body == 1 else other
    found.__name__ = found.__qualname__ = "f"
    return found


def made(body=1, **changes):
    config = PatchConfig(TINY, **changes)  # type: ignore[arg-type]
    config.replace_function("f", function(body))
    return config


def test_every_part_counts():
    digests = [config_digest(made()), config_digest(made(2)), config_digest(made(description="d"))]
    digests.append(
        config_digest(made(label="mine:config"))
    )  # modules with `map_class` have the name of a config
    for change in (
        lambda c: c.add_post_import_block("X = 1"),
        lambda c: c.drop_import_names("x"),
        lambda c: c.exclude_from_output("x"),
        lambda c: c.add_import("math"),
        lambda c: c.add_slot("s", op="rms_norm", variant="v"),
        lambda c: c.rewrite("f", pattern="a({x})", replacement="b({x})"),
        lambda c: c.rewrite("f", pattern="a({x})", replacement="c({x})"),
        lambda c: setattr(c, "device", "npu"),
        lambda c: c.add_helper(property(function(1))),
        lambda c: c.add_helper(property(function(2))),
    ):
        config = made()
        change(config)
        digests.append(config_digest(config))
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize(
    "changes",
    [
        (lambda c: None, lambda c: None),
        (lambda c: c.drop_import_names("a", "b"), lambda c: c.drop_import_names("b", "a")),
        (lambda c: None, lambda c: setattr(c, "origin", "elsewhere.py:1")),
        (lambda c: c.add_helper(property(function(1))), lambda c: c.add_helper(property(function(1)))),
    ],
    ids=["who makes it", "the order of a set", "where it was written", "the object of a property"],
)
def test_what_does_not_count(changes):
    configs = [made(), made()]
    for config, change in zip(configs, changes, strict=True):
        change(config)
    assert config_digest(configs[0]) == config_digest(configs[1])


def test_the_name_that_a_module_has_for_a_config_counts():
    named = {"PatchConfig": PatchConfig, "TINY": TINY, "__name__": "mine"}
    exec("config = PatchConfig(TINY)", named)
    before = config_digest(named["config"])  # type: ignore[arg-type]
    named["other"] = named.pop("config")
    assert config_digest(named["other"]) != before  # type: ignore[arg-type]


def test_a_replacement_that_is_only_named_counts_by_its_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    config = PatchConfig(TINY)
    config.add_patch(create_patch_from_external("TinyModel", "named_of_test", "TinyModel"))
    (tmp_path / "named_of_test.py").write_text("class TinyModel: pass")
    before = config_digest(config)
    (tmp_path / "named_of_test.py").write_text("class Renamed: pass")
    assert config_digest(config) != before
