"""Tracebacks of errors raised by an import statement: the frames of this package are removed.

The cause is in a user's patch or settings, and the message says where; frames of the pipeline explain
nothing. Errors that are bugs of this package keep every frame.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import TracebackType

from veomni_hook.errors import IdiomError, VeomniHookError
from veomni_hook.finders.state import STATE
from veomni_hook.settings import ENVIRONMENT

__all__ = ["fold", "innermost"]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_IMPORTLIB = (
    "<frozen importlib",
    os.path.dirname(os.path.abspath(os.__file__)) + os.sep + "importlib" + os.sep,
)


def fold(error: BaseException) -> bool:
    """Remove the frames of this package and of importlib from an error and its causes.

    Returns:
        Whether frames were removed: not for errors of other libraries, for bugs of this package, or if the
        setting `traceback` is `full`.
    """
    # The settings may be the cause of the error, or not read yet.
    read = STATE.resolved
    wanted = os.environ.get(ENVIRONMENT["traceback"]) if read is None else read.settings.traceback
    if not isinstance(error, VeomniHookError) or isinstance(error, IdiomError) or wanted == "full":
        return False
    for raised in _chain(error):
        frames = [*_entries(raised.__traceback__)]
        # If another library raises inside our code, our frames are needed to explain it.
        if isinstance(raised, VeomniHookError) or (frames and not _is_ours(frames[-1])):
            kept = None
            for entry in reversed([entry for entry in frames if not _is_left_out(entry)]):
                kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
            raised.__traceback__ = kept
        before = raised.__context__
        if before is not None and all(_is_left_out(entry) for entry in _entries(before.__traceback__)):
            raised.__suppress_context__ = True  # from an attempt inside this package, without user frames
    return True


def innermost(error: BaseException) -> str:
    """Return ``file:line`` of the innermost frame outside this package and importlib."""
    kept = [entry for entry in _entries(error.__traceback__) if not _is_left_out(entry)]
    return f"{kept[-1].tb_frame.f_code.co_filename}:{kept[-1].tb_lineno}" if kept else ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _is_left_out(entry: TracebackType) -> bool:
    return _is_ours(entry) or entry.tb_frame.f_code.co_filename.startswith(_IMPORTLIB)


def _is_ours(entry: TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(_PACKAGE)
