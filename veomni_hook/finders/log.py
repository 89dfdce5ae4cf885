"""Messages of the hook: notes through logging, problems as warnings, requested output on standard error."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

from veomni_hook.errors import VeomniHookWarning
from veomni_hook.finders.state import STATE
from veomni_hook.printable import printable

LOGGER = logging.getLogger("veomni_hook")


def note(message: str) -> None:
    """Log at INFO, visible if logging is configured."""
    LOGGER.info("%s", printable(message))


def say(message: str) -> None:
    """Log one line at INFO if logging shows it, otherwise print it on standard error."""
    message = printable(message)
    if LOGGER.isEnabledFor(logging.INFO) and LOGGER.hasHandlers():
        LOGGER.info("%s", message)
        return
    if sys.stderr is None:
        return
    line = f"veomni-hook: {message}"
    bars: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if getattr(bars, "_instances", None):  # a progress bar is visible, and the line would end up inside it
        bars.write(line, file=sys.stderr)
    else:
        print(line, file=sys.stderr)


def warn(message: str) -> None:
    """Warn about something that did not work as requested."""
    warnings.warn(message, VeomniHookWarning, stacklevel=2)


def warn_once(message: str, about: str = "") -> None:
    """Warn once per process, regardless of the warnings filter.

    Args:
        message: the warning.
        about: the subject, used to detect repetition if the text can vary.
    """
    about = about or message
    if about not in STATE.said:
        STATE.said.add(about)
        warnings.warn(message, VeomniHookWarning, stacklevel=2)
