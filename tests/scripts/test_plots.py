"""The pictures in docs/images, held against the recorded results that they show."""

import re
from importlib.metadata import version

import pytest

from scripts import plots, svg

PINNED = (plots.ROOT / "constraints-dev.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(plots.PLOTS))
def test_a_committed_picture_shows_the_recorded_numbers(name):
    plot = plots.PLOTS[name]
    picture = (plots.IMAGES / f"{name}.svg").read_text(encoding="utf-8")
    assert svg.described(plot.title, plot.data()) in picture, "python -m scripts.plots draws it anew"
    assert len(picture) < 100_000
    assert "prefers-color-scheme: dark" in picture
    # Colours that a dark page would hide are those that the picture turns.
    drawn = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", picture.partition("</style>")[2]))
    assert drawn <= {*svg.DARK, *svg.COLOURS.values()}


def test_every_picture_is_shown_in_a_document():
    pages = [plots.ROOT / "README.md", *(plots.ROOT / "docs").rglob("*.md")]
    documents = [path.read_text(encoding="utf-8") for path in pages]
    for path in plots.IMAGES.glob("*.svg"):
        assert any(f"images/{path.name}" in text for text in documents), path.name


def test_results_that_are_missing_are_an_error(monkeypatch):
    monkeypatch.setattr(plots, "_read", lambda _: {"rows": []})
    with pytest.raises(ValueError, match="record it with veomni-hook bench"):
        plots.kernels_data()


@pytest.mark.slow
def test_the_pictures_are_drawn_again_byte_for_byte(tmp_path, monkeypatch):
    if f"matplotlib=={version('matplotlib')}\n" not in PINNED:
        pytest.skip("another matplotlib than the one in constraints-dev.txt")
    committed = plots.IMAGES
    monkeypatch.setattr(plots, "IMAGES", tmp_path)
    plots.main()
    for name in plots.PLOTS:
        assert (tmp_path / f"{name}.svg").read_bytes() == (committed / f"{name}.svg").read_bytes()
