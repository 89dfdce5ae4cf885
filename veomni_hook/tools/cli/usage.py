"""Wrong use of the command line: its error, what raises it, and the exit statuses of every command."""

from __future__ import annotations

from pathlib import Path

from veomni_hook.errors import ConfigError, KernelError, LockError, SettingsError, VeomniHookError

FOUND = 1
WRONG_USE = 2


class UsageError(VeomniHookError):
    """The user asked for something that does not exist or makes no sense."""


def exit_status(error: VeomniHookError) -> int:
    """Return the exit status for an error: user input errors are wrong use, the rest is a finding."""
    wrong_use = UsageError | SettingsError | ConfigError | KernelError | LockError
    return WRONG_USE if isinstance(error, wrong_use) else FOUND


def write_file(file: Path, text: str, what: str, fix: str = "name a file in a writable folder") -> None:
    """Write the text to a file that the user named, with unchanged line endings.

    Raises:
        UsageError: it cannot be written; the message calls the text ``what``.
    """
    try:
        file.write_bytes(text.encode("utf-8"))
    except OSError as error:
        raise UsageError(f"{what} cannot be written: {error.strerror}", where=str(file), fix=fix) from error
