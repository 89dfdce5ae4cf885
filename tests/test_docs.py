"""The documents, held against the code that they describe."""

import re
from pathlib import Path

import pytest

from veomni_hook.tools.cli.app import COMMANDS
from veomni_hook.tools.coverage import Row
from veomni_hook.tools.lock import changes

DOCS = Path(__file__).resolve().parents[1] / "docs"


def text(name):
    return " ".join((DOCS / name).read_text(encoding="utf-8").split())


def test_the_keys_of_a_row_are_documented() -> None:
    document = text("maintain/coverage.md")
    row = Row("m", "t", "o", "v", "routed", "").to_dict()
    assert all(f"| `{key}` |" in document for key in row)


def test_every_result_of_a_comparison_is_documented() -> None:
    document = text("maintain/continuous-integration.md")
    names = [name for name in changes.__all__ if name.isupper() and name not in {"MATTERS", "PARAMETER"}]
    results = [getattr(changes, name) for name in names]
    told = {
        changes.LINE: "Other lines alone are counted",
        changes.NEW: "| `new`,",
        changes.NOT_OVERRIDDEN: "`no longer overridden` |",
    }
    assert all(told.get(result, f"| `{result}` |") in document for result in results)


@pytest.mark.parametrize("document", sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")))
def test_commands_and_files_that_documents_name_exist(document: str) -> None:
    source = (DOCS / document).read_text(encoding="utf-8")
    assert {*re.findall(r"(?m)(?:^ *|`)veomni-hook ([a-z]+)", source)} <= {*COMMANDS}
    for link in re.findall(r"\]\((?!https:)([^):#]+)", source):
        assert (DOCS / document).parent.joinpath(link).exists(), link


def test_the_pre_commit_hook_that_is_documented_is_the_one_that_is_offered():
    offered = (DOCS.parent / ".pre-commit-hooks.yaml").read_text(encoding="utf-8")
    (name,) = re.findall(r"^- id: (\S+)$", offered, re.MULTILINE)
    (entry,) = re.findall(r"^  entry: (.+)$", offered, re.MULTILINE)
    document = (DOCS / "maintain" / "continuous-integration.md").read_text(encoding="utf-8")
    assert re.findall(r"- id: (\S+)$", document, re.MULTILINE) == [name, name]
    assert re.findall(r"entry: (.+)$", document, re.MULTILINE) == [entry]
    assert entry.split()[0] == "veomni-hook" and entry.split()[1] in COMMANDS
