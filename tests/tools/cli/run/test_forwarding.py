"""Where a command's own options end, and the user's command begins."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from veomni_hook.tools.cli.app import app
from veomni_hook.tools.cli.run.forwarding import separated

GROUP: Any = typer.main.get_command(app)


def parameters(name: str) -> list[Any]:
    command = GROUP.get_command(None, name)
    found: list[Any] = command.get_params(command.make_context(name, [], resilient_parsing=True))
    return found


@pytest.mark.parametrize("name", ["run", "compare"])
@pytest.mark.parametrize(
    ("given", "at"),
    [
        (["s.py", "--help"], 0),
        (["-m", "mod", "-m", "--help"], 2),
        (["-m", "mod", "--", "x"], 2),
        (["-mmod", "x"], 1),
        (["--module=mod", "-h"], 1),
        (["--module", "mod", "-h"], 2),
        (["--", "-odd.py", "--", "x"], None),
        (["--help"], None),
        (["-m"], None),
        (["-m", "mod"], None),
        ([], None),
    ],
)
def test_the_rest_belongs_to_the_script(name: str, given: list[str], at: int | None) -> None:
    expected = given if at is None else [*given[:at], "--", *given[at:]]
    assert separated(given, parameters(name)) == expected


@pytest.mark.parametrize(
    ("given", "at"),
    [
        (["--steps", "3", "train.py", "--steps", "9"], 2),
        (["--steps=3", "--json", "-o", "x.html", "torchrun", "--nproc_per_node", "2"], 4),
        (["-ox.html", "--verbose", "train.py"], 2),
        (["--cwd", "there", "-m", "package.module", "--json"], 4),
        (["--json", "--", "-odd.py"], None),
        (["--steps"], None),
    ],
)
def test_values_of_options_are_not_the_script(given: list[str], at: int | None) -> None:
    expected = given if at is None else [*given[:at], "--", *given[at:]]
    assert separated(given, parameters("compare")) == expected
