"""`veomni-hook run --nproc N --sp N --ep N`: several processes of this machine, and what they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from veomni_hook.settings import ENVIRONMENT, Settings, axes_of, resolve
from veomni_hook.tools.cli.run.program import command_of, python
from veomni_hook.tools.cli.usage import UsageError

__all__ = ["settings_with", "several"]

_WHERE = "veomni-hook run"


def settings_with(options: Mapping[str, int | None]) -> Settings:
    """Return the settings in force with the sizes of axes that options name; None: the option is not there.

    Raises:
        UsageError: VEOMNI_PARALLEL says something else.
    """
    resolved = resolve()
    sizes = axes_of(resolved.settings.parallel)
    wanted = sizes | {axis: size for axis, size in options.items() if size is not None}
    if wanted == sizes:
        return resolved.settings
    variable = ENVIRONMENT["parallel"]
    if resolved.provenance["parallel"].source == variable:
        words = " ".join(f"--{axis} {size}" for axis, size in options.items() if size is not None)
        both = ",".join(f"{axis}={size}" for axis, size in wanted.items())
        raise UsageError(
            f"{words} contradicts {variable}={resolved.settings.parallel or 'none'}",
            where=_WHERE,
            fix=f"leave one of them out, or set {variable}={both}",
        )
    return resolve(overrides={"parallel": wanted}).settings


def several(words: Sequence[str], module: str | None, processes: str, settings: Settings) -> list[str]:
    """Return the command by which torchrun starts a script or module in several processes of this machine.

    Args:
        words: the script and its arguments, or the arguments of the module.
        module: run this module.
        processes: how many, or a word that torchrun knows (`auto`, `gpu`).
        settings: their sizes of axes must divide the processes.

    Raises:
        UsageError: there is no such script, it is a program of its own, or sizes do not fit.
    """
    if module is None and command_of(words) != [*python(), *words]:
        raise UsageError(
            f"--nproc starts a Python script or a module, not {words[0]}",
            where=_WHERE,
            fix="name the script itself, or -m and a module; with another launcher leave --nproc out:"
            " veomni-hook run --sp 2 torchrun --nproc_per_node 2 train.py",
        )
    count = _count(processes)
    for axis, size in axes_of(settings.parallel).items():
        if count % size:
            legal = ", ".join(str(number) for number in range(1, count + 1) if count % number == 0)
            raise UsageError(
                f"{axis}={size} does not divide the {count} processes",
                where=_WHERE,
                fix=f"choose {axis} from {legal}, or another --nproc",
            )
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count))
    return [*python(), *launcher, *(() if module is None else ("-m", module)), *words]


def _count(processes: str) -> int:
    if processes.isascii() and processes.isdigit():
        count = int(processes)
    else:
        # Only torch knows this machine's devices, and importing it takes seconds.
        from torch.distributed.run import determine_local_world_size

        try:
            count = determine_local_world_size(processes)
        except ValueError as error:
            raise UsageError(f"--nproc {processes}: {error}", where=_WHERE, fix=_LEGAL) from None
    if count < 1:
        raise UsageError(f"--nproc {processes}: no process", where=_WHERE, fix=_LEGAL)
    return count


_LEGAL = "a whole number from 1, auto (one for each device, or each core without any), gpu or cpu"
