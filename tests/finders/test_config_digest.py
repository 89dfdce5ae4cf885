"""What a cached entry depends on besides upstream: files of configs, digests of registered ones."""

from __future__ import annotations

from veomni_hook import PatchConfig, create_patch_from_external
from veomni_hook.finders.config_digest import config_digest


def made(body=1, **changes):
    config = PatchConfig("transformers.models.tiny.modeling_tiny", **changes)  # type: ignore[arg-type]

    config.replace_function("f", (one if body == 1 else other)())
    return config


def one():  # type: ignore[no-untyped-def]
    def f(x: int) -> int:
        return x + 1

    f.__qualname__ = "f"
    return f


def other():  # type: ignore[no-untyped-def]
    def f(x: int) -> int:
        return x + 2

    f.__qualname__ = "f"
    return f


def test_equal_configs_have_equal_digests_whoever_makes_them():
    assert config_digest(made()) == config_digest(made())


def test_every_part_counts():
    digests = [config_digest(made()), config_digest(made(2)), config_digest(made(description="d"))]
    for change in (
        lambda c: c.add_post_import_block("X = 1"),
        lambda c: c.drop_import_names("x"),
        lambda c: c.exclude_from_output("x"),
        lambda c: c.add_import("math"),
        lambda c: c.add_slot("s", op="rms_norm", variant="v"),
        lambda c: c.rewrite("f", pattern="a({x})", replacement="b({x})"),
        lambda c: c.rewrite("f", pattern="a({x})", replacement="c({x})"),
        lambda c: setattr(c, "device", "npu"),
    ):
        config = made()
        change(config)
        digests.append(config_digest(config))
    assert len(set(digests)) == len(digests)


def test_the_name_of_a_config_counts():
    """Modules with `map_class` have it."""
    assert config_digest(made(label="mine:config")) != config_digest(made(label="mine:other"))
    named = {"PatchConfig": PatchConfig, "TINY": "transformers.models.tiny.modeling_tiny", "__name__": "mine"}
    exec("config = PatchConfig(TINY)", named)
    before = config_digest(named["config"])  # type: ignore[arg-type]
    named["other"] = named.pop("config")
    assert config_digest(named["other"]) != before  # type: ignore[arg-type]


def test_properties_count_by_their_functions():
    def config(body: int) -> PatchConfig:
        made_config = PatchConfig("transformers.models.tiny.modeling_tiny")
        made_config.add_helper(property((one if body == 1 else other)()))
        return made_config

    assert config_digest(config(1)) == config_digest(config(1)) != config_digest(config(2))


def test_a_replacement_that_is_only_named_counts_by_its_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    config = PatchConfig("transformers.models.tiny.modeling_tiny")
    config.add_patch(create_patch_from_external("TinyModel", "named_of_test", "TinyModel"))
    (tmp_path / "named_of_test.py").write_text("class TinyModel: pass")
    before = config_digest(config)
    (tmp_path / "named_of_test.py").write_text("class Renamed: pass")
    assert config_digest(config) != before


def test_the_order_of_a_set_does_not_count():
    one, two = made(), made()
    one.drop_import_names("a", "b", "c")
    two.drop_import_names("c", "b", "a")
    assert config_digest(one) == config_digest(two)


def test_where_a_config_was_written_does_not_count():
    one, two = made(), made()
    two.origin = "elsewhere.py:1"
    assert config_digest(one) == config_digest(two)
