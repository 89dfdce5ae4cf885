"""`veomni-hook plan`: what memory a training script's step will take, before it runs."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from veomni_hook.tools.cli import output
from veomni_hook.tools.cli.inputs.options import JsonOption, ModuleOption, ScriptArgument, VerboseOption
from veomni_hook.tools.cli.run.forwarding import ForwardingCommand
from veomni_hook.tools.cli.run.program import command_of
from veomni_hook.tools.cli.usage import UsageError, write_file
from veomni_hook.tools.facts import Facts

LINES = 15


def plan(
    command: ScriptArgument = None,
    module: ModuleOption = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What a step may take, as in 80GiB. Default: what the GPU has."),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=1, metavar="TOKENS", help="Say which settings reach sequences of this length."),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Also write an HTML page.", show_default=False),
    ] = None,
    *,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Say what memory a step of your training script will take: where it goes, and which length fits.

    The script runs with the hook up to the first call of its model in training, with an optimizer. This call
    is predicted and not run: its own code runs on tensors without data, in a few seconds, and the script is
    stopped. So it needs the memory for its weights, but not for a step. A model on a GPU needs a GPU.

    Exits with 1 if no model was called, or if its step cannot be predicted.
    """
    from veomni_hook.errors import PredictionError
    from veomni_hook.sizes import bytes_of
    from veomni_hook.tools.report.memory_plan import MemoryPlan

    words = command or []
    if module is None and not words:
        raise UsageError("no script and no module", where="veomni-hook plan", fix="name one: plan train.py")
    facts = _facts(
        command_of(words, module), None if memory is None else bytes_of(memory), length, verbose=verbose
    )
    if "fix" in facts:
        raise PredictionError(facts["what"], where=facts["where"], fix=facts["fix"])
    found = MemoryPlan.from_dict(facts)
    if as_json:
        output.emit_json(found.to_dict())
    else:
        output.emit_heading(found.title())
        output.emit_table(("part", "size", "share"), found.rows())
        output.emit("".join(f"{sentence}\n" for sentence in found.statements()))
    if page is not None:
        write_file(page, found.to_html(), "the page", "name another file with -o")
        output.note(f"written: {page}")


plan.command_class = ForwardingCommand  # type: ignore[attr-defined]


def _facts(command: list[str], memory: int | None, reach: int | None, *, verbose: bool) -> Facts:
    """Return what the script's first process wrote. Raises UsageError if it wrote nothing."""
    from veomni_hook.settings import resolve
    from veomni_hook.tools.compare import process
    from veomni_hook.tools.compare.plan import PLANNED, Plan
    from veomni_hook.tools.compare.turns import environ_of

    with TemporaryDirectory(prefix="veomni-plan-") as name:
        folder = Path(name)
        settings = resolve().settings
        order = {"memory": memory, "reach": reach, "setting": settings.memory}
        # With any value, the patched text has the places of all; the planner sets the user's own.
        settings = replace(settings, memory=settings.memory or "tiles")
        environ = environ_of(Plan(name, 1, time.time(), order), settings, hooked=True, environ=os.environ)
        written, log = folder / PLANNED, folder / "log"
        with open(log, "wb") as file:
            ended = process.run(
                command,
                environ,
                cwd=None,
                output=None if verbose else file,
                watch=written.exists,
                limit=None,
            )
        if written.exists():
            facts: Facts = json.loads(written.read_text(encoding="utf-8"))
            return facts
        said = "\n".join(process.tail(log, LINES))
        raise UsageError(
            f"the script ended (exit status {ended.status}) before a model was called in training\n{said}",
            where=" ".join(command),
            fix="check that it trains a model of transformers, or call veomni_hook.explain(model, plan=...)",
        )
