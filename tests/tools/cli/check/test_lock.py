"""`check` and the lock, with the idiom for tests: see `tests.tools.cli.transcript`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patches import fake_idiom
from veomni_hook.patches.idioms import recognise
from veomni_hook.tools.cli.check import lock
from veomni_hook.tools.cli.inputs import sources

from ..transcript import compare, here

NORM = "class {name}:\n    def forward(self, x):\n        return self.scale * x\n"


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project's folder without any config, and in it a transformers package of two families."""
    monkeypatch.setattr(recognise, "idioms", lambda *_: (fake_idiom.module(),))
    monkeypatch.setattr("veomni_hook.patches.models.all_spec_modules", list)
    monkeypatch.setattr(sources, "transformers_folder", lambda: str(tmp_path / "site" / "transformers"))
    monkeypatch.setenv("VEOMNI_PATCHES", "")
    monkeypatch.chdir(tmp_path)
    for family in ("tiny", "other"):
        file = tmp_path / "site" / "transformers" / "models" / family / f"modeling_{family}.py"
        file.parent.mkdir(parents=True)
        file.write_text(NORM.format(name=f"{family.title()}Norm"))
    (tmp_path / "site" / "transformers" / "__init__.py").write_text('__version__ = "5.1.0"\n')


def test_what_is_printed() -> None:
    compare("lock", here, {})


def test_a_lock_that_nobody_named_is_not_written_through_another_users_link(
    tmp_path: Path, give_away: Callable[[Path], None]
) -> None:
    link = Path(lock.NAME)
    link.symlink_to(tmp_path / "absent")
    give_away(link)
    done = here(["check", "--write-lock"], {})
    assert done.status != 0 and "belongs to user" in done.err
    assert not (tmp_path / "absent").exists()
    assert here(["check", "--write-lock", "--lock", lock.NAME], {}).status == 0
    assert (tmp_path / "absent").exists()


def test_the_nearest_lock_upward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "recorded" not in here(["check"], {}).out
    here(["check", "--write-lock"], {})
    (tmp_path / "src").mkdir()
    monkeypatch.chdir("src")
    assert "2 recorded" in here(["check"], {}).out


def test_a_lock_that_is_no_text_is_wrong_use() -> None:
    Path("some.lock").write_bytes(b"\xff")
    done = here(["check", "--lock", "some.lock"], {})
    assert done.status == 2 and "some.lock" in done.err and "fix:" in done.err
