"""Settings: every source, their order, and what illegal values say."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from veomni_hook.errors import SettingsError
from veomni_hook.settings import ENVIRONMENT, Settings, resolve


def test_defaults(tmp_path: Path) -> None:
    resolved = resolve({}, str(tmp_path))
    assert resolved.settings == Settings()
    assert {p.source for p in resolved.provenance.values()} == {"default"}
    assert resolved.file is None


def test_every_field_has_a_variable() -> None:
    assert set(ENVIRONMENT) == {field.name for field in fields(Settings)}


def test_precedence_and_what_each_winner_beat(tmp_path: Path) -> None:
    file = tmp_path / "veomni-hook.toml"
    file.write_text('kernels = "eager"\nstrict = true\npatches = ["a"]\n')
    resolved = resolve(
        {"VEOMNI_KERNELS": "torch", "VEOMNI_PATCHES": "b, c"}, str(tmp_path), {"kernels": "auto"}
    )
    assert resolved.settings.kernels == "auto"
    assert resolved.settings.strict is True
    assert resolved.settings.patches == ("b", "c")
    found = resolved.provenance["kernels"]
    assert found.source == "activate()"
    assert found.beaten == (("VEOMNI_KERNELS", "torch"), (str(file), "eager"), ("default", "auto"))
    assert resolved.provenance["strict"].source == str(file)


def test_the_nearest_file_upward_counts(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[tool.veomni-hook]\nkernels = "eager"\n')
    (tmp_path / "a" / "pyproject.toml").write_text('[tool.other]\nkernels = "torch"\n')
    assert resolve({}, str(inner)).settings.kernels == "eager"
    (inner / "veomni-hook.toml").write_text('kernels = "torch"\n')
    assert resolve({}, str(inner)).settings.kernels == "torch"


@pytest.mark.parametrize(
    ("environment", "field", "value"),
    [
        ({"VEOMNI_HOOK": "0"}, "enabled", False),
        ({"VEOMNI_STRICT": "yes"}, "strict", True),
        ({"VEOMNI_DUMP_PATCHED": "1"}, "dump_patched", True),
        ({"VEOMNI_DUMP_DIR": "d"}, "dump_dir", "d"),
        ({"VEOMNI_CACHE_DIR": "c"}, "cache_dir", "c"),
        ({"VEOMNI_DEVICE": "npu"}, "device", "npu"),
        ({"VEOMNI_STRICT": ""}, "strict", False),
        ({"VEOMNI_IDIOMS": "0"}, "idioms", False),
        ({}, "idioms", True),
        ({"VEOMNI_REMOTE_CODE": "1"}, "remote_code", True),
        ({}, "remote_code", False),
    ],
)
def test_environment(tmp_path: Path, environment: dict[str, str], field: str, value: object) -> None:
    assert getattr(resolve(environment, str(tmp_path)).settings, field) == value


@pytest.mark.parametrize(
    ("environment", "overrides", "parts"),
    [
        ({"VEOMNI_STRICT": "maybe"}, {}, ("VEOMNI_STRICT", "'maybe'", "true")),
        ({"VEOMNI_DEVICE": "tpu"}, {}, ("VEOMNI_DEVICE", "'tpu'", "gpu, npu")),
        ({}, {"kernel": "auto"}, ("unknown setting 'kernel'", "activate()", "kernels")),
        ({}, {"patches": [1]}, ("patches", "[1]", "module names")),
        ({}, {"cache_dir": 3}, ("cache_dir", "3", "string")),
    ],
)
def test_illegal_values(
    tmp_path: Path, environment: dict[str, str], overrides: dict[str, object], parts: tuple[str, ...]
) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve(environment, str(tmp_path), overrides)
    assert all(part in str(caught.value) for part in parts)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "veomni-hook.toml").write_text("kernels = \n")
    with pytest.raises(SettingsError) as caught:
        resolve({}, str(tmp_path))
    assert caught.value.where == str(tmp_path / "veomni-hook.toml")


def test_unknown_variables_of_ours_are_listed_not_refused(tmp_path: Path) -> None:
    assert resolve({"VEOMNI_KERNEL": "x"}, str(tmp_path)).unknown_environment == ("VEOMNI_KERNEL",)


def test_paths_are_accepted_for_folders(tmp_path: Path) -> None:
    assert resolve({}, str(tmp_path), {"cache_dir": tmp_path}).settings.cache_dir == str(tmp_path)
