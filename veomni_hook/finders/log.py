"""What the hook says: notes through logging, problems as warnings, requested output on standard error."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

from veomni_hook.errors import VeomniHookWarning
from veomni_hook.finders.state import STATE

LOGGER = logging.getLogger("veomni_hook")


def note(message: str) -> None:
    """Log at INFO: visible to whoever configured logging."""
    LOGGER.info(message)


def say(message: str) -> None:
    """Print one line on standard error, or log it at INFO where logging shows that: never both."""
    if LOGGER.isEnabledFor(logging.INFO) and LOGGER.hasHandlers():
        LOGGER.info(message)
        return
    if sys.stderr is None:
        return
    line = f"veomni-hook: {message}"
    bars: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if getattr(bars, "_instances", None):  # a progress bar is drawn, and the line would end up in it
        bars.write(line, file=sys.stderr)
    else:
        print(line, file=sys.stderr)


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
