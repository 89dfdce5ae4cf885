"""The badges of the README say what the project's metadata says."""

from __future__ import annotations

from scripts import badges


def test_badges_are_current_and_shown() -> None:
    readme = (badges.ROOT / "README.md").read_text(encoding="utf-8")
    for path, text in badges.files().items():
        assert path.read_text(encoding="utf-8") == text, "run `python -m scripts.badges`"
        assert f"({path.relative_to(badges.ROOT).as_posix()})" in readme
        label, value = badges.texts()[path.stem.removeprefix("badge-")]
        assert f"![{label}: {value}]" in readme
