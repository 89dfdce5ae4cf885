"""What the hook says: notes through logging, problems as warnings, requested output on standard error."""

from __future__ import annotations

import logging
import sys
import warnings

from veomni_hook.errors import VeomniHookWarning
from veomni_hook.finders.state import STATE

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
    """Warn about something that did not go as asked."""
    warnings.warn(message, VeomniHookWarning, stacklevel=2)


def warn_once(message: str, about: str = "") -> None:
    """Warn once a process, whatever the warnings filter repeats.

    Args:
        message: the warning.
        about: what it is about, where the text can differ from one time to the next.
    """
    about = about or message
    if about not in STATE.said:
        STATE.said.add(about)
        warnings.warn(message, VeomniHookWarning, stacklevel=2)
