"""Settings: every source, their order, and what illegal values say."""

from __future__ import annotations

import os
import warnings
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from veomni_hook import ownership, settings, settings_file
from veomni_hook.errors import SettingsError, VeomniHookWarning
from veomni_hook.settings import ENVIRONMENT, Settings, resolve


def test_defaults(tmp_path):
    resolved = resolve({}, str(tmp_path))
    assert resolved.settings == Settings()
    assert {p.source for p in resolved.provenance.values()} == {"default"}
    assert resolved.file is None


def test_every_field_has_a_variable():
    assert set(ENVIRONMENT) == {field.name for field in fields(Settings)}


def test_precedence_and_what_each_winner_beat(tmp_path):
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


def test_the_nearest_file_upward_counts(tmp_path):
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
        ({"VEOMNI_BANNER": "off"}, "banner", False),
        ({}, "banner", True),
        ({"VEOMNI_TRACEBACK": "full"}, "traceback", "full"),
        ({"VEOMNI_SPEECH": "0"}, "speech", False),
        ({}, "speech", True),
        ({"VEOMNI_HOST_VALUES": "1"}, "host_values", True),
        ({"VEOMNI_DETERMINISTIC": "batch_invariant"}, "deterministic", "batch_invariant"),
        ({"VEOMNI_DETERMINISTIC": "none"}, "deterministic", ""),
        ({"VEOMNI_PARALLEL": " ep=4, sp = 2 "}, "parallel", "sp=2,ep=4"),
        ({"VEOMNI_PARALLEL": "sp=1"}, "parallel", ""),
        ({"VEOMNI_PARALLEL": "none"}, "parallel", ""),
    ],
)
def test_environment(tmp_path, environment, field, value):
    assert getattr(resolve(environment, str(tmp_path)).settings, field) == value


@pytest.mark.parametrize(
    ("environment", "overrides", "parts"),
    [
        ({"VEOMNI_STRICT": "maybe"}, {}, ("VEOMNI_STRICT", "'maybe'", "true")),
        ({"VEOMNI_DEVICE": "tpu"}, {}, ("VEOMNI_DEVICE", "'tpu'", "gpu, npu")),
        ({"VEOMNI_TRACEBACK": "long"}, {}, ("VEOMNI_TRACEBACK", "'long'", "short, full")),
        ({"VEOMNI_DETERMINISTIC": "1"}, {}, ("VEOMNI_DETERMINISTIC", "'1'", "batch_invariant, none")),
        ({"VEOMNI_PARALLEL": "sp=0"}, {}, ("VEOMNI_PARALLEL", "'sp=0'", "sp=2,ep=4")),
        ({"VEOMNI_PARALLEL": "sp=2,sp=2"}, {}, ("VEOMNI_PARALLEL", "axes: sp, ep")),
        ({"VEOMNI_PARALLEL": "tp=2"}, {}, ("VEOMNI_PARALLEL", "axes: sp, ep")),
        ({"VEOMNI_PARALLEL": "2"}, {}, ("VEOMNI_PARALLEL", "axes: sp, ep")),
        ({}, {"kernel": "auto"}, ("unknown setting 'kernel'", "activate()", "kernels")),
        ({}, {"patches": [1]}, ("patches", "[1]", "module names")),
        ({}, {"cache_dir": 3}, ("cache_dir", "3", "string")),
    ],
)
def test_illegal_values(tmp_path, environment, overrides, parts):
    with pytest.raises(SettingsError) as caught:
        resolve(environment, str(tmp_path), overrides)
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"kernels = \n", "cannot be read"),
        (b"kernels = '\xff'\n", "cannot be read"),
        (b'cache_dir = "a\\u0000b"\n', "illegal value"),
    ],
    ids=["no TOML", "no text", "a null byte"],
)
def test_an_unreadable_file_is_named(tmp_path, text, said):
    (tmp_path / "veomni-hook.toml").write_bytes(text)
    with pytest.raises(SettingsError, match=said) as caught:
        resolve({}, str(tmp_path))
    assert str(tmp_path / "veomni-hook.toml") in caught.value.where


def test_unknown_variables_of_ours_are_listed_not_refused(tmp_path):
    assert resolve({"VEOMNI_KERNEL": "x"}, str(tmp_path)).unknown_environment == ("VEOMNI_KERNEL",)


def test_paths_are_accepted_for_folders(tmp_path):
    assert resolve({}, str(tmp_path), {"cache_dir": tmp_path}).settings.cache_dir == str(tmp_path)


class TestFilesOfOthers:
    """Which settings files are obeyed."""

    @pytest.fixture(autouse=True)
    def nothing_said(self, monkeypatch):
        monkeypatch.setattr(settings, "_said", set())

    @pytest.fixture
    def path(self, tmp_path):
        """A settings file that is obeyed."""
        path = tmp_path / "veomni-hook.toml"
        path.write_text("strict = true\n")
        return path

    def refused(self, folder: Path, part: str) -> None:
        with pytest.warns(VeomniHookWarning, match="is ignored") as caught:
            resolved = resolve({}, str(folder))
        assert resolved.settings == Settings()
        assert resolved.file is None
        (said,) = caught
        (ignored,) = resolved.ignored
        assert part in str(said.message) and part in ignored
        assert "chown" in str(said.message) and "environment" in str(said.message)

    @pytest.mark.parametrize("name", ["veomni-hook.toml", "pyproject.toml"])
    def test_a_file_of_another_user_is_ignored_once(self, tmp_path, give_away, name):
        head = "" if name == "veomni-hook.toml" else "[tool.veomni-hook]\n"
        (tmp_path / name).write_text(f'{head}dump_dir = "elsewhere"\ndump_patched = true\n')
        assert resolve({}, str(tmp_path)).settings.dump_dir == "elsewhere"
        give_away(tmp_path / name)
        self.refused(tmp_path, "belongs to user")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            resolve({}, str(tmp_path))  # said already

    def test_the_superuser_obeys_no_other_users_file(self, tmp_path, path, monkeypatch):
        if os.geteuid() == 0:
            os.chown(path, 1000, 1000)
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        self.refused(tmp_path, "not to user 0")

    def test_a_file_of_the_superusers_is_obeyed(self, tmp_path, monkeypatch):
        (tmp_path / "veomni-hook.toml").write_text("strict = true\n")
        monkeypatch.setattr(ownership, "_SUPERUSER", os.geteuid())
        monkeypatch.setattr(os, "geteuid", lambda: 4243)
        assert resolve({}, str(tmp_path)).settings.strict

    @pytest.mark.parametrize(
        ("mode", "obeyed"), [(0o644, True), (0o600, True), (0o646, False), (0o666, False)]
    )
    def test_a_file_that_every_user_can_write(self, tmp_path, path, mode, obeyed):
        path.chmod(mode)
        if obeyed:
            assert resolve({}, str(tmp_path)).settings.strict
        else:
            self.refused(tmp_path, f"can be written by other users (mode {mode:04o})")

    @pytest.mark.parametrize(
        ("user", "group", "members", "obeyed"),
        [
            ("me", "me", [], True),
            ("me", "me", ["me"], True),
            ("me", "me", ["me", "you"], False),
            ("me", "staff", [], False),
        ],
    )
    def test_a_file_that_a_group_can_write(self, tmp_path, path, monkeypatch, user, group, members, obeyed):
        path.chmod(0o664)
        gid = path.stat().st_gid
        monkeypatch.setattr("pwd.getpwuid", lambda _: SimpleNamespace(pw_gid=gid, pw_name=user))
        monkeypatch.setattr("grp.getgrgid", lambda _: SimpleNamespace(gr_name=group, gr_mem=members))
        if obeyed:
            assert resolve({}, str(tmp_path)).settings.strict
            monkeypatch.setattr("pwd.getpwuid", lambda _: SimpleNamespace(pw_gid=gid + 1, pw_name=user))
        self.refused(tmp_path, "can be written by other users (mode 0664)")

    def test_a_group_without_a_name_is_nobodys_own(self, tmp_path, path, monkeypatch):
        def unknown(_: int) -> None:
            raise KeyError

        path.chmod(0o664)
        monkeypatch.setattr("pwd.getpwuid", unknown)
        self.refused(tmp_path, "mode 0664")

    @pytest.mark.parametrize(("mode", "obeyed"), [(0o777, False), (0o1777, True), (0o775, True)])
    def test_a_folder_in_which_everyone_could_swap_the_file(self, tmp_path, mode, obeyed):
        folder = tmp_path / "shared"
        folder.mkdir()
        (folder / "veomni-hook.toml").write_text("strict = true\n")
        folder.chmod(mode)
        if obeyed:
            assert resolve({}, str(folder)).settings.strict
        else:
            self.refused(folder, "has no sticky bit")

    def test_a_link_of_another_user_to_a_file_of_ones_own(self, tmp_path, give_away):
        (tmp_path / "own").mkdir()
        (tmp_path / "own" / "veomni-hook.toml").write_text("strict = true\n")
        (tmp_path / "shared").mkdir()
        link = tmp_path / "shared" / "veomni-hook.toml"
        link.symlink_to(tmp_path / "own" / "veomni-hook.toml")
        assert resolve({}, str(tmp_path / "shared")).settings.strict
        give_away(link)
        with pytest.warns(VeomniHookWarning, match="belongs to user"):
            assert not resolve({}, str(tmp_path / "shared")).settings.strict

    def test_the_search_goes_on_above_an_ignored_file(self, tmp_path, give_away):
        (tmp_path / "veomni-hook.toml").write_text('kernels = "eager"\n')
        (tmp_path / "in").mkdir()
        inner = tmp_path / "in" / "veomni-hook.toml"
        inner.write_text('kernels = "torch"\n')
        inner.chmod(0o666)
        with pytest.warns(VeomniHookWarning, match="mode 0666"):
            resolved = resolve({}, str(tmp_path / "in"))
        assert resolved.settings.kernels == "eager"

    def test_strict_mode_makes_it_an_error(self, tmp_path):
        path = tmp_path / "veomni-hook.toml"
        path.write_text("")
        path.chmod(0o666)
        with pytest.raises(SettingsError, match="must not be used") as caught:
            resolve({"VEOMNI_STRICT": "1"}, str(tmp_path))
        assert caught.value.where == str(path) and "chown" in caught.value.fix

    @pytest.mark.parametrize(
        "text", ["[tool.veomni-hook\n", "veomni-hook = " + "[" * 5000, "# veomni-hook\nx = 1\n"]
    )
    def test_others_cannot_stop_an_import_with_a_pyproject_of_theirs(self, tmp_path, text):
        path = tmp_path / "pyproject.toml"
        path.write_text(text)
        path.chmod(0o666)
        resolved = resolve({}, str(tmp_path))
        assert (resolved.file, resolved.ignored) == (None, ())

    def test_a_file_that_cannot_be_read_is_ignored_with_a_reason(self, tmp_path, path, monkeypatch):

        def closed(name: str, *_: object) -> int:
            raise PermissionError(13, "Permission denied", name)

        monkeypatch.setattr(settings_file.os, "open", closed)
        self.refused(tmp_path, "cannot be read: Permission denied")

    def test_a_system_without_user_ids_obeys_any_file(self, tmp_path, path, monkeypatch):
        path.chmod(0o666)
        monkeypatch.delattr(os, "geteuid")
        assert resolve({}, str(tmp_path)).settings.strict


def test_sizes_of_parallel_axes(tmp_path):
    (tmp_path / "veomni-hook.toml").write_text("parallel = { sp = 2, ep = 1 }\n")
    found = resolve({}, str(tmp_path)).settings
    assert (found.parallel, found.axis("sp"), found.axis("ep")) == ("sp=2", 2, 1)
    assert resolve({}, str(tmp_path), {"parallel": {"ep": 8}}).settings.axis("ep") == 8


def test_what_a_step_may_take(tmp_path):
    (tmp_path / "veomni-hook.toml").write_text('memory = "1.5 GiB"\n')
    memory = resolve({}, str(tmp_path)).settings.memory
    assert memory == resolve({}, str(tmp_path), {"memory": memory}).settings.memory == f"{3 << 29}B"
    assert resolve({"VEOMNI_MEMORY": "auto"}, str(tmp_path)).settings.memory == "auto"
    both = {"offload": "64GiB", "tiles": True}
    asked = resolve({}, str(tmp_path), {"memory": both}).settings.memory
    assert asked == f"checkpoint,offload={64 << 30},tiles"
    for wrong in ("40", "40GiB,tiles", "auto,tiles", "40XB", "40GiB=1", "checkpoint=1GiB", "tiles=0"):
        with pytest.raises(SettingsError, match="auto for what the device has"):
            resolve({}, str(tmp_path), {"memory": wrong})
