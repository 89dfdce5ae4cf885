from __future__ import annotations

from pathlib import Path

from ..conftest import TINY, Command, starter


def test_families_are_listed_and_the_users_configs_apart(tiny: Command) -> None:
    found = tiny("list", "--json").json
    (config,) = (row for row in found["configs"] if row["config"] == "tiny_config:config")
    assert (config["family"], config["from"], config["patches"]) == ("tiny", "settings", 1)
    assert {row["from"] for row in found["configs"]} == {"settings"}
    assert (found["transformers"], found["families"]) == ("5.99.0", [])  # nothing is routed in the stand-in
    done = tiny("list", "--all")
    assert ["auto", "-"] in [line.split() for line in done.out.splitlines()]
    assert "\nyour patches\n" in done.out and "modeling_" not in done.out
    assert "\n0 of " in done.err and "veomni-hook list FAMILY" in done.err


def test_the_installed_qwen3(veomni: Command) -> None:
    done = veomni("list", "qwen3", "--by", "family")
    header, row = (line.split(maxsplit=1) for line in done.out.splitlines())
    assert header == ["family", "routed ops"] and row[0] == "qwen3"
    ops = row[1].split(", ")
    assert ops == sorted(ops) and {"rms_norm", "rotary", "linear_cross_entropy"} < set(ops)
    assert "1 of 1 family with routed ops" in done.err


def test_configs_of_settings_are_listed_with_their_modules(tiny: Command) -> None:
    done = tiny("list", "--by", "module", "--json")
    rows = {row["config"]: row for row in done.json}
    assert done.status == 0
    assert rows["tiny_config:config"] == {
        "family": "tiny",
        "module": TINY,
        "config": "tiny_config:config",
        "from": "settings",
        "device": "any",
        "patches": 1,
        "slots": [],
        "installed": True,
        "routes": {},
    }
    built_in = [row["module"] for row in done.json if row["from"] == "built-in"]
    assert not any(module.startswith("transformers.") for module in built_in), "no setting wants them"


def test_built_in_specs_that_the_settings_want_are_listed(
    tiny_environ: dict[str, str], tmp_path: Path
) -> None:
    """The stand-in for transformers does not have their modules."""
    done = starter({**tiny_environ, "VEOMNI_PARALLEL": "sp=2"}, tmp_path)("list", "--by", "module", "--json")
    built_in = {row["module"]: row["installed"] for row in done.json if row["from"] == "built-in"}
    assert built_in["transformers.modeling_utils"] is built_in["transformers.trainer"] is False


def test_all_adds_modules_without_patches(tiny: Command) -> None:
    rows = {row["module"]: row for row in tiny("list", "--by", "module", "--all", "--json").json}
    assert rows["transformers.models.auto.modeling_auto"]["patches"] == 0
    assert rows[TINY]["patches"] == 1


def test_the_table_has_the_same_rows(tiny: Command) -> None:
    done = tiny("list", "--by", "module")
    lines = done.out.splitlines()
    assert lines[0].split() == [
        *("family", "config", "from", "device", "patches", "slots", "installed", "routes")
    ]
    assert len(lines) - 1 == len(tiny("list", "--by", "module", "--json").json)
    assert any(line.split()[:2] == ["tiny", "tiny_config:config"] for line in lines)


def test_a_config_that_cannot_be_loaded_is_a_finding(tiny: Command) -> None:
    done = tiny("list", "--json", VEOMNI_PATCHES="broken_config,tiny_config")
    assert done.status == 1
    assert "broken_config" in done.err and "fix:" in done.err
    assert any(row["module"] == TINY for row in done.json["configs"])
