"""Wrong use of the command line: its error, and the exit statuses of every command."""

from __future__ import annotations

from veomni_hook.errors import ConfigError, KernelError, LockError, SettingsError, VeomniHookError

FINE = 0
FOUND = 1
WRONG_USE = 2


class UsageError(VeomniHookError):
    """The user asked for something that does not exist or makes no sense."""


def exit_status(error: VeomniHookError) -> int:
    """Return the exit status for an error: user input errors are wrong use, the rest is a finding."""
    wrong_use = UsageError | SettingsError | ConfigError | KernelError | LockError
    return WRONG_USE if isinstance(error, wrong_use) else FOUND
