"""The options and arguments of several commands, and the module that they select, patched."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from veomni_hook.layout import counted
from veomni_hook.tools.cli import output
from veomni_hook.tools.cli.inputs.targets import complete_family, module_name
from veomni_hook.tools.cli.usage import UsageError
from veomni_hook.tools.facts import Facts

if TYPE_CHECKING:
    from veomni_hook.finders.prepare import Prepared
    from veomni_hook.patches.spec import PatchConfig

SYSTEMS = ("cpu", "sm80", "sm90", "sm100", "rocm", "ascend")


class Device(StrEnum):
    """The kind of accelerator that configs apply to."""

    gpu = "gpu"
    npu = "npu"


def complete_system(incomplete: str) -> list[str]:
    """Complete the name of a system for the shell."""
    return [name for name in SYSTEMS if name.startswith(incomplete)]


def families_argument(help_: str, metavar: str = "FAMILY") -> Any:
    """Return the argument of a command that takes several families or modules."""
    return typer.Argument(metavar=metavar, help=help_, autocompletion=complete_family, show_default=False)


TargetArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="TARGET",
        help="A family (qwen3), a module, a class, a model's id (Qwen/Qwen3-0.6B) or its folder.",
        autocompletion=complete_family,
        show_default=False,
    ),
]
ConfigOption = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="PACKAGE.MODULE[:NAME]",
        help="Apply only this config (written for veomni-hook or for patchgen) to its source module.",
        show_default=False,
    ),
]
DeviceOption = Annotated[
    Device | None,
    typer.Option("--device", help="Apply the configs for this kind of accelerator.", show_default=False),
]
SystemOption = Annotated[
    str | None,
    typer.Option(
        "--system",
        metavar="NAME",
        help="Choose kernels for another machine with all packages: cpu, sm80, sm90, sm100, rocm or ascend.",
        autocompletion=complete_system,
        show_default=False,
    ),
]
WrittenForOption = Annotated[
    str | None,
    typer.Option(
        "--written-for",
        metavar="RELEASE",
        help="The transformers release that a config was made for: a version, a wheel, or a folder. Default:"
        " what the config or the file that patchgen generated beside it says; otherwise the installed"
        " release.",
        show_default=False,
    ),
]
JobsOption = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        metavar="NUMBER",
        min=1,
        help="How many processes to use. Default: one for each processor.",
        show_default=False,
    ),
]
ScriptArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SCRIPT [ARGS]...",
        help="The script, or a launcher such as torchrun or accelerate, and its arguments.",
        show_default=False,
    ),
]
ModuleOption = Annotated[
    str | None,
    typer.Option("-m", "--module", metavar="MODULE", help="Run a module, as `python -m` does."),
]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", help="Show what the script prints (on standard error).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]


def write_to(context: typer.Context, file: Path | None) -> None:
    """Let what the command prints go to a file, as a shell does it.

    Raises:
        UsageError: the file cannot be written.
    """
    if file is None:
        return
    try:
        stream = context.with_resource(file.open("w", encoding="utf-8", newline=""))
    except OSError as error:
        fix = "name a file in a writable folder"
        raise UsageError(
            f"the output cannot be written: {error.strerror}", where=str(file), fix=fix
        ) from error
    context.call_on_close(lambda: output.note(f"wrote {file}"))
    context.with_resource(redirect_stdout(stream))


#: The command needs to do nothing about it.
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write the result to this file, not to stdout.",
        callback=write_to,
        show_default=False,
    ),
]


def device_on(system: str | None) -> Device | None:
    """Return the device whose configs would apply on a named system; None: as on this machine."""
    if system is None or system == "cpu":
        return None
    return Device.npu if system == "ascend" else Device.gpu


def import_from_here() -> None:
    """Let configs be imported from the working directory, as `python -m` does; installed modules win."""
    try:
        here = os.getcwd()
    except OSError:  # it was deleted, so it contains nothing
        return
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)


@dataclass(frozen=True)
class Picked:
    """One module, the configs that are applied alone (None: what an import would apply), and the device."""

    module: str
    configs: tuple[PatchConfig, ...] | None
    device: str | None


def prepared(target: str | None, config: str | None, device: Device | None) -> Prepared:
    """Patch the module that the options name, without importing it.

    Raises:
        UsageError: no target, two targets, or one that does not exist.
        ConfigError: the config cannot be loaded.
        PatchError: a patch does not apply.
    """
    from veomni_hook.finders.prepare import prepare
    from veomni_hook.settings import resolve

    # What a config's packages print while they are imported must not mix with the result.
    with redirect_stdout(sys.stderr):
        settings = resolve().settings
        chosen = picked(target, config, device)
        return prepare(chosen.module, settings, configs=chosen.configs, device=chosen.device)


def picked(target: str | None, config: str | None, device: Device | None) -> Picked:
    """Return the module that the options name, and the configs of ``config`` for it.

    Raises:
        UsageError, ConfigError: as `prepared`.
    """
    import_from_here()
    kind = device.value if device is not None else None
    if target is None and config is None:
        raise UsageError(
            "no target",
            where="the command line",
            fix="name a family (qwen3), a module, or --config package.module",
        )
    module = module_name(target) if target is not None else None
    if config is None:
        return Picked(str(module), None, kind)
    from veomni_hook.finders.configs import load

    (loaded,) = load([config])
    fitting = [c for c in loaded.configs if kind is None or c.device in (None, kind)]
    modules = dict.fromkeys(c.source_module for c in fitting)
    pattern = next((c.source_module for c in fitting if c.is_pattern), None)
    if module is None and pattern is not None:
        raise UsageError(
            f"{config} is for every module that {pattern} matches",
            where=f"config {config}",
            fix="name one of them as the target too: a family (qwen3), or a module",
        )
    if module is None and len(modules) > 1:
        raise UsageError(
            f"{config} holds configs for {counted(len(modules), 'module')}",
            where=f"config {config}",
            fix=f"name one as the target too: {', '.join(modules)}",
        )
    chosen = module if module is not None else next(iter(modules), None)
    fitting = [c for c in fitting if chosen is not None and c.applies_to(chosen)]
    if chosen is None or not fitting:
        offered = ", ".join(f"{c.source_module} ({c.device or 'any device'})" for c in loaded.configs)
        raise UsageError(
            f"{config} has no config for {module or 'this device'}" + (f" on {kind}" if kind else ""),
            where=f"config {config}",
            fix=f"it holds: {offered}",
        )
    devices = {c.device for c in fitting} - {None}
    if kind is None and len(devices) == 1:
        kind = devices.pop()
    return Picked(chosen, tuple(fitting), kind)


def facts_of(found: Prepared) -> Facts:
    """Return the first fields of every JSON document about a prepared module."""
    return {
        "module": found.module,
        "source": found.original_path,
        "stored": found.stored_path,
        "cache": found.cache,
        "patch_hash": found.patch_hash,
        "reason": found.reason,
    }
