"""`veomni-hook dump`: the self-contained patched source, with the line numbers that tracebacks show."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from veomni_hook.cli import output
from veomni_hook.cli.inputs.options import (
    ConfigOption,
    DeviceOption,
    JsonOption,
    TargetArgument,
    facts_of,
    prepared,
)
from veomni_hook.cli.pager import PagerOption, show
from veomni_hook.cli.usage import write_file


def dump(
    target: TargetArgument = None,
    config: ConfigOption = None,
    device: DeviceOption = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write to this file, not to stdout.", show_default=False
        ),
    ] = None,
    *,
    pager: PagerOption = True,
    as_json: JsonOption = False,
) -> None:
    """Print the patched source of a module, with relative imports made absolute.

    Line numbers are those of tracebacks and breakpoints. Neither the module nor torch is imported. A module
    without patches is printed as it is installed.
    """
    from veomni_hook.patches.render import dump_text

    found = prepared(target, config, device)
    text = dump_text(found.stored_text, found.module)
    if as_json:
        text = output.json_text({**facts_of(found), "text": text})
    elif found.patched is None:
        output.note(f"{found.module}: {found.reason}; this is the installed source")
    if file is not None:
        write_file(file, text, "the output")
        output.note(f"wrote {file}")
    elif as_json:
        output.emit(text)
    else:
        show(text, "python", paged=pager)
