"""Pages and tables that scripts write are what they would write today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers

import veomni_hook
from scripts import commands, models, tables
from veomni_hook import checkpoints
from veomni_hook.tools.cli.inputs.sources import source_tree
from veomni_hook.tools.cli.sites.table import examined, rows_of, supplied
from veomni_hook.tools.coverage import Row

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = models.DOCUMENT.read_text(encoding="utf-8")
#: A dense model, one that is not routed everywhere, a mixture of experts, and one that came late.
SOME = ("llama", "llama4", "qwen3_moe", "youtu")


def test_the_page_of_models_names_its_releases() -> None:
    *others, last = models.RELEASES
    words = " ".join(PAGE.split())
    assert f"of transformers {last} with code" in words
    assert f"as of the releases {', '.join(others)} and {last}." in words


newest = pytest.mark.skipif(
    transformers.__version__ != models.RELEASES[-1],
    reason="the pages are those of another transformers release",
)


@newest  # another release brings another typer, which writes the help otherwise
def test_the_page_of_commands() -> None:
    assert commands.document() == commands.DOCUMENT.read_text(encoding="utf-8"), (
        "python -m scripts.commands writes it anew"
    )


def current(families: tuple[str, ...]) -> dict[str, dict[str, list[str]]]:
    """What is routed of these families, or of all, and what is not, in the installed release."""
    found = models.by_family(supplied(rows_of(examined(source_tree().files(families)))))
    return {family: models.cells(rows) for family, rows in found.items()}


@newest
def test_the_table_of_models_for_some_families() -> None:
    table, found = models.shown(tables.read("models")), current(SOME)
    assert {*found} == {*SOME}
    assert {family: table[family] for family in found} == found, "python -m scripts.models writes it anew"


@newest
@pytest.mark.slow
def test_the_table_of_models() -> None:
    assert models.shown(tables.read("models")) == current(()), "python -m scripts.models writes it anew"


@pytest.mark.parametrize("name", tables.TABLES)
def test_a_table_of_the_code(name: str) -> None:
    assert tables.read(name) == tables.TABLES[name](), "python -m scripts.tables writes it anew"


@pytest.mark.parametrize("path", sorted(tables.DATA.iterdir()), ids=lambda path: path.stem)
def test_a_table_has_a_row_a_line_and_is_shown(path: Path) -> None:
    rows = tables.read(path.stem)
    assert path.read_text(encoding="utf-8") == tables.text(rows)
    assert len({(*row,) for row in rows}) == 1, "the columns are those of the first row"
    assert any(f"data/{path.name})" in page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))


def row(op: str, variant: str, status: str = "routed", reason: str = "", family: str = "tiny") -> Row:
    return Row(
        f"transformers.models.{family}.modeling_{family}", f"{op}.forward", op, variant, status, reason
    )


def test_a_table_of_two_releases() -> None:
    found = {
        "5.1.0": models.by_family([row("norm", "a")]),
        "5.2.0": models.by_family(
            [
                row("norm", "a"),
                row("norm", "a"),
                row("norm", "b"),
                row("rotary", "", "missed", "nearest is c: expected | , found < (line 3)"),
                row("rotary", "d", "no_kernel", "no machine has one"),
                row("norm", "a", family="late"),
            ]
        ),
    }
    lines = [*models.summary(found)]
    page = tables.placed(f"head\n{models.BEGIN}old\n{tables.END}tail\n", models.BEGIN, lines)
    assert page.startswith("head\n") and page.endswith("tail\n") and "old" not in page
    assert "| any candidate | 1 | 2 |\n| `norm` | 1 | 2 |\n" in page
    assert tables.placed(page, models.BEGIN, lines) == page
    late, tiny = models.table(found)
    assert late == {"family": "late", "since": "5.2.0", "routed": ["norm: a"], "not routed": []}
    assert tiny == {
        "family": "tiny",
        "since": "5.1.0",
        "routed": ["norm: a x2, b (5.2.0)"],
        "not routed": [
            "rotary rotary.forward: nearest is c: expected | , found <",
            "rotary rotary.forward: no kernel for the formula d",
        ],
    }
    assert models.shown([tiny])["tiny"] == models.cells(found["5.2.0"]["tiny"])


def test_the_reference_has_every_public_name() -> None:
    shown = {*re.findall(r"(?m)^::: (\S+)$", (DOCS / "api.md").read_text(encoding="utf-8"))}
    public = {f"veomni_hook.{name}" for name in veomni_hook.__all__}
    public |= {f"veomni_hook.checkpoints.{name}" for name in checkpoints.__all__}
    # All of this module is shown.
    errors = {"VeomniHookError", "VeomniHookWarning", "checkpoints.CheckpointError"}
    assert "veomni_hook.errors" in shown
    missing = public - shown - {f"veomni_hook.{name}" for name in errors}
    assert missing == set(), "docs/api.md lacks them: add a line `::: name`"
