"""The repository's own files for a code host: they can be read, and what they name exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.test_packaging import PROJECT, targets

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[0-9]*.yml"))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow(path: Path) -> None:
    workflow = read(path)
    assert {"name", "permissions", "jobs"} <= {*workflow} and workflow["name"] == path.stem
    assert workflow["permissions"] == {"contents": "read"}, "more is given to single jobs"
    assert True in workflow or "on" in workflow  # YAML 1.1 reads `on` as true
    jobs = workflow["jobs"]
    for job in jobs.values():
        needed = job.get("needs", [])
        assert {*([needed] if isinstance(needed, str) else needed)} <= {*jobs}
        if "uses" in job:
            assert (ROOT / job["uses"]).is_file()
            continue
        assert job["runs-on"] and job["timeout-minutes"]
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            assert re.fullmatch(r"[\w.-]+/[\w.-]+@[\w./]+", step.get("uses", "a/b@v1"))
            assert {*re.findall(r"make ([a-z]+)", step.get("run", ""))} <= targets()


def test_tests_run_on_every_python_that_is_announced() -> None:
    announced = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if "Python :: 3." in one]
    assert (
        read(ROOT / ".github/workflows/tests.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
        == announced
    )


def test_a_release_is_tested_built_attested_and_published_without_a_token() -> None:
    path = ROOT / ".github/workflows/release.yml"
    jobs = read(path)["jobs"]
    assert [(name, job.get("needs")) for name, job in jobs.items()] == [
        ("tests", None),
        ("build", "tests"),
        ("attest", "build"),
        ("publish", "attest"),
    ]
    assert jobs["publish"]["permissions"] == {"id-token": "write"} and jobs["publish"]["environment"]
    assert "secrets." not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form(path: Path) -> None:
    form = read(path)
    assert form["name"] and form["description"] and form["body"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    named = [field["id"] for field in fields]
    assert len({*named}) == len(named)
    for field in fields:
        assert field["type"] in ("input", "textarea", "dropdown", "checkboxes")
        assert field["attributes"]["label"] and isinstance(field["validations"]["required"], bool)
        assert field["type"] != "dropdown" or all(
            isinstance(one, str) for one in field["attributes"]["options"]
        )


def test_forms_that_documents_name_exist() -> None:
    named = {*re.findall(r'form\s"([^"]+)"', (ROOT / "docs" / "faq.md").read_text(encoding="utf-8"))}
    assert named and named <= {read(path)["name"] for path in FORMS}


def test_hooks_for_commits_run_what_lint_runs() -> None:
    (repository,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    entries = [hook["entry"].removeprefix(".venv/bin/") for hook in repository["hooks"]]
    assert all(hook["language"] == "system" and hook["id"] and hook["name"] for hook in repository["hooks"])
    rules = (ROOT / "Makefile").read_text(encoding="utf-8")
    lint = re.findall(r"^\t\$\(BIN\)/(.+)$", rules.partition("\nlint:")[2].partition("\n\n")[0], re.MULTILINE)
    assert [entry.partition(" --")[0] for entry in entries] == [
        line.partition(" .")[0].partition(" --")[0] for line in lint[:3]
    ]
    assert "mkdocs build --strict" in lint, "with --quiet it would count no warnings"
