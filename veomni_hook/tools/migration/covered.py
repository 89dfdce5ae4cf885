"""Whether this package serves everything that a patch is for, so that the patch is unnecessary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from veomni_hook.patches.spec import Patch, PatchConfig
from veomni_hook.tools.migration import vocabulary as words
from veomni_hook.tools.migration.answers import HERE, NOT_NEEDED, PARTLY, Answer, answer
from veomni_hook.tools.migration.concerns import Concern, concerns

__all__ = ["Coverage", "coverage"]


@dataclass(frozen=True)
class Coverage:
    """What a patch is for, and what serves each of these concerns; ``answers`` are in the same order."""

    concerns: tuple[Concern, ...]
    answers: tuple[Answer, ...]

    @property
    def complete(self) -> bool:
        """Whether the patch is unnecessary: everything that it is for is here or not needed."""
        return all(one.status in (HERE, NOT_NEEDED) for one in self.answers)

    @property
    def by(self) -> str:
        """What serves the concerns that are served."""
        served = [one.by for one in self.answers if one.status in (HERE, NOT_NEEDED)]
        return ", ".join(dict.fromkeys(filter(None, served)))

    @property
    def left(self) -> list[str]:
        """The concerns that are not served, each with its evidence and what there is of it or planned."""
        return [
            f"{_purpose(concern)} ({concern.evidence}; {_said(given)})"
            for concern, given in zip(self.concerns, self.answers, strict=True)
            if given.status not in (HERE, NOT_NEEDED)
        ]


def coverage(patch: Patch, config: PatchConfig, ops: Sequence[str], upstream: str | None) -> Coverage:
    """Return what a patch is for, and what of it is served.

    Args:
        patch: the patch.
        config: its config.
        ops: what idioms route inside its target, as ``op/variant``.
        upstream: the module's text in the release that the patch was written for, if it is known.

    Raises:
        ReplacementError: the source of the replacement, or of a helper, cannot be read.
        SyntaxError: ``upstream``, or a block of the config, is not valid Python.
    """
    found = concerns(patch, config, upstream)
    return Coverage(found, tuple(answer(one, ops) for one in found))


def _purpose(concern: Concern) -> str:
    return "another purpose" if concern.name == words.OTHER else concern.name


def _said(given: Answer) -> str:
    return f"{given.status}: {given.by}" if given.status == PARTLY else given.by or given.status
