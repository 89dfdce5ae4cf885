"""Faults that the suite has to find: a cache without one of its promises, idioms that take look-alikes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _not_atomic() -> None:
    """Files are written where they belong, with no temporary file, in two halves."""
    import os

    from veomni_hook.cache import trusted_folder

    def write(self: Any, name: str, data: bytes) -> None:
        descriptor = self.open_raw(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            for half in (data[: len(data) // 2], data[len(data) // 2 :]):
                os.write(descriptor, half)
        finally:
            os.close(descriptor)

    trusted_folder.Root.write = write  # type: ignore[method-assign]


def _texts_unchecked() -> None:
    """Whatever the text is, its seal is the right one."""
    from veomni_hook.cache import entry

    entry.check_text = lambda root, manifest: root.read(manifest.text)  # type: ignore[assignment]


def _bytecode_unchecked() -> None:
    """Of the bytecode nothing is checked."""
    from veomni_hook.cache import entry

    entry.check_bytecode = lambda data, *_: memoryview(data)[entry._PAYLOAD_AT :]  # type: ignore[assignment]


def _owners_unchecked() -> None:
    """Whoever could have written a file, it is taken."""
    from veomni_hook.cache import trusted_folder

    trusted_folder.ownership_problem = lambda status, **_: ""  # type: ignore[assignment]


def _variables_unseen() -> None:
    """No variable of the environment has ever changed."""
    from veomni_hook.cache import inputs

    inputs._KINDS["variable"] = (lambda name: "", "{}")


#: Each by its name; called before a part of the suite, they spoil the process.
FAULTS: dict[str, Callable[[], None]] = {
    "publishing is not atomic": _not_atomic,
    "texts are unchecked": _texts_unchecked,
    "bytecode is unchecked": _bytecode_unchecked,
    "owners are unchecked": _owners_unchecked,
    "variables are not seen": _variables_unseen,
}


def sloppy_idioms() -> Callable[[], None]:
    """Idioms take whatever stands where a formula was seen before; returns what undoes it."""
    from veomni_hook.patches.graph import Match, forms

    right, seen = forms.match, {}

    def sloppy(pattern: Any, form: Any, rules: Any) -> Any:
        made = right(pattern, form, rules)
        if isinstance(made, Match):
            seen.setdefault(pattern.result, made)
        return seen.get(pattern.result, made)

    forms.match = sloppy  # type: ignore[assignment]

    def undo() -> None:
        forms.match = right  # type: ignore[assignment]

    return undo
