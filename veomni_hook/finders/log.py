"""What the hook says: notes through logging, problems as warnings, requested output on standard error."""

from __future__ import annotations

import logging
import sys
import warnings

from veomni_hook.errors import VeomniHookWarning

LOGGER = logging.getLogger("veomni_hook")


def note(message: str) -> None:
    """Log at INFO: visible to whoever configured logging."""
    LOGGER.info(message)


def say(message: str) -> None:
    """Print one line that the user asked for (`VEOMNI_DUMP_PATCHED=1`), whatever logging is set to."""
    if LOGGER.isEnabledFor(logging.INFO):
        LOGGER.info(message)
    else:
        print(f"veomni-hook: {message}", file=sys.stderr)


def warn(message: str) -> None:
    """Warn once about something that did not go as asked."""
    warnings.warn(message, VeomniHookWarning, stacklevel=2)
