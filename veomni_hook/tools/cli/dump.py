"""`veomni-hook dump`: the patched source of a module, or of many in a folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from veomni_hook.tools.cli import output
from veomni_hook.tools.cli.inputs.options import (
    ConfigOption,
    Device,
    DeviceOption,
    JsonOption,
    facts_of,
    families_argument,
    import_from_here,
    picked,
    write_to,
)
from veomni_hook.tools.cli.pager import PagerOption, show
from veomni_hook.tools.cli.usage import UsageError, write_file

if TYPE_CHECKING:
    from veomni_hook.finders.prepare import Prepared


def _file_or_folder(context: typer.Context, named: str | None) -> str | None:
    """Return a folder; let what the command prints go to a file."""
    if named is None or named.endswith(("/", os.sep)) or os.path.isdir(named):
        return named
    write_to(context, Path(named))
    return None


def dump(
    targets: Annotated[
        list[str] | None,
        families_argument("Families (qwen3), modules, classes, a model's id or its folder.", "TARGET"),
    ] = None,
    config: ConfigOption = None,
    device: DeviceOption = None,
    folder: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE|FOLDER/",
            help="Write the result to this file, not to stdout; or a file for each module to this folder.",
            callback=_file_or_folder,
            show_default=False,
        ),
    ] = None,
    *,
    standalone: Annotated[
        bool,
        typer.Option(
            "--standalone",
            help="Print a file that runs where this package is not installed: without guards, with the"
            " formulas of kernels as functions at its end.",
        ),
    ] = False,
    pager: PagerOption = True,
    as_json: JsonOption = False,
) -> None:
    """Print the patched source of a module, with relative imports made absolute.

    Line numbers are those of tracebacks and breakpoints. Neither the module nor torch is imported. A module
    without patches is printed as it is installed. The header has the command that makes the text again:
    `veomni-hook check --generated FILE` compares.

    With -o FOLDER/, each module is a file of the folder, with the module's last name. Without a TARGET, these
    are all modules that --config patches, or that the configs in the settings and of plugins patch.

    With --standalone, patches of configs are applied. Formulas that are one function of torch are called as
    this function, with upstream's numbers up to rounding; all else that is routed is upstream's code.
    """
    if folder is not None:
        _write(folder, targets or (), config, device, standalone=standalone, as_json=as_json)
        return
    if len(targets or ()) > 1:
        fix = "name one, or a folder for all: -o FOLDER/"
        raise UsageError("stdout and a file are for one module", where="the command line", fix=fix)
    module, text = _made(next(iter(targets or ()), None), config, device, standalone=standalone)
    if as_json:
        output.emit_json({**facts_of(module), "text": text})
        return
    if module.patched is None:
        output.note(f"{module.module}: {module.reason}; this is the installed source")
    if text:
        show(text, "python", paged=pager)


def _made(
    target: str | None, config: str | None, device: Device | None, *, standalone: bool
) -> tuple[Prepared, str]:
    from veomni_hook.settings import resolve
    from veomni_hook.tools.generation.generate import Recipe

    with redirect_stdout(sys.stderr):
        chosen = picked(target, config, device)
        recipe = Recipe(chosen.module, config or "", chosen.device, standalone)
        return recipe.made(resolve().settings, chosen.configs)


def _write(
    folder: str,
    targets: Sequence[str],
    config: str | None,
    device: Device | None,
    *,
    standalone: bool,
    as_json: bool,
) -> None:
    """Write a file for each module; all of them are made before the first is written."""
    made: dict[Path, tuple[Prepared, str]] = {}
    for target in output.track(targets or _of_configs(config, device), "patching"):
        module, text = _made(target, config, device, standalone=standalone)
        file = Path(folder, f"{module.module.rpartition('.')[2]}.py")
        if module.patched is None:
            output.note(f"{module.module}: {module.reason}; no file is written")
        elif file in made and made[file][0].module != module.module:
            raise UsageError(
                f"two modules have this name: {made[file][0].module} and {module.module}",
                where=str(file),
                fix="write them to two folders",
            )
        else:
            made[file] = module, text
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        fix = "name a folder in a writable one"
        raise UsageError(f"it cannot be made: {error.strerror}", where=folder, fix=fix) from error
    for file, (_, text) in made.items():
        write_file(file, text, "the patched module")
        output.note(f"wrote {file}")
    if as_json:
        output.emit_json([{**facts_of(module), "file": str(file)} for file, (module, _) in made.items()])


def _of_configs(config: str | None, device: Device | None) -> list[str]:
    """The modules that a config patches, or the user's configs and plugins.

    Raises:
        UsageError: there is none.
        ConfigError: a config cannot be loaded.
    """
    from veomni_hook.settings import resolve
    from veomni_hook.tools.cli.inputs.configs import BUILT_IN, OPTION, load_all, modules_of, names

    import_from_here()
    named = [one for one in names(resolve().settings) if one[0] != BUILT_IN]
    sources = load_all([(OPTION, config)] if config is not None else named)
    wanted = (None, device) if device is not None else (None, "gpu", "npu")
    modules = modules_of(one for source in sources for one in source.configs if one.device in wanted)
    if not modules:
        raise UsageError(
            "no target, and no config names a module",
            where="the command line",
            fix="name a family (qwen3), a module, --config package.module, or configs in VEOMNI_PATCHES",
        )
    return modules
