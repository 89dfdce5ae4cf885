"""A plan: the steps that the configs of one module declare, and the edits that carry them out.

Every edit carries the index of its step, so the report can assign the lines of the result to steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from veomni_hook.errors import PatchError
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.edit import Edit, marker_comment
from veomni_hook.patches.code.wrap import wrapped
from veomni_hook.patches.report import Remark
from veomni_hook.patches.routes.compose import with_copies
from veomni_hook.patches.spec import Patch, PatchConfig

__all__ = ["Origin", "Plan", "Step"]


@dataclass(frozen=True)
class Origin:
    """Where the upstream source came from."""

    module: str
    path: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.module} ({self.distribution} {self.version}, {self.path})"


@dataclass(frozen=True, eq=False)
class Step:
    """One thing that a config declares.

    ``kind`` is a `PatchType` value, ``helper``, ``post_import_block``, ``slot``, ``drop_import`` or
    ``exclude``. ``payload`` is the `Patch`, `ImportSpec`, helper object, block or `SlotSpec`. ``declared`` is
    the target as written in the config, possibly a pattern.
    """

    kind: str
    target: str
    reason: str
    config: PatchConfig
    payload: Any = None
    declared: str = ""

    @property
    def patch(self) -> Patch:
        """The payload of a step that came from a `Patch`."""
        if not isinstance(self.payload, Patch):
            raise TypeError(f"a {self.kind} step has no patch")
        return self.payload

    @property
    def declaration(self) -> str:
        """The line that declares it, and the config; for errors."""
        return f"declared in {self.config.place_of(self.payload)} ({self.config.name}{self.config.announced})"

    def __str__(self) -> str:
        site = self.payload.site if isinstance(self.payload, Patch) else None
        formula = f" {site.op}/{site.variant}" if site is not None else ""
        return f"{self.kind}{formula} of {self.target}"

    @property
    def lenient(self) -> bool:
        """Whether the config was made for patchgen, so that patchgen's rules apply."""
        return self.config.lenient


@dataclass
class Plan:
    """The edits of one module, as the planning functions collect them."""

    document: Document
    origin: Origin
    steps: list[Step]
    edits: list[Edit] = field(default_factory=list)
    #: The kind under which a step is reported, if it is not the declared kind (an override that adds).
    kinds: dict[int, str] = field(default_factory=dict)
    #: Steps that another step's edits carry out (two names dropped from one import).
    shared: dict[int, set[int]] = field(default_factory=dict)
    #: What is wrong with lenient configs, and the steps that have no effect because of it.
    remarks: list[Remark] = field(default_factory=list)
    idle: set[int] = field(default_factory=set)
    #: Modules of external replacements that are not installed.
    wanting: list[str] = field(default_factory=list)

    def where(self, index: int) -> str:
        """The module, and where step ``index`` is declared; for errors."""
        return f"{self.origin}; {self.steps[index].declaration}"

    def tolerate(self, index: int, error: PatchError, *, instead: str = "") -> None:
        """Record an error of a step as a remark if its config is lenient.

        Args:
            index: the step.
            error: the error.
            instead: what happens now, if the step does not simply go on.

        Raises:
            PatchError: ``error`` itself, if the config is not lenient.
        """
        step = self.steps[index]
        if not step.lenient:
            raise error
        what = f"{error.what}; {instead}" if instead else error.what
        self.remarks.append(Remark(step.config.name, step.target, what, error.where, error.fix))

    def of_kind(self, *kinds: str) -> Iterator[tuple[int, Step]]:
        """The steps of these kinds with their indices, in order."""
        return ((index, step) for index, step in enumerate(self.steps) if step.kind in kinds)

    def add(self, index: int, *edits: Edit) -> None:
        """Plan edits of step ``index``."""
        self.edits += (replace(edit, patch=index) for edit in edits)

    def change(self, index: int, start: int, end: int, text: str) -> None:
        """Plan to replace a range of the source with ``text``."""
        self.edits.append(Edit(start, end, text, index))

    def insert(self, index: int, offset: int, text: str) -> None:
        """Plan to insert ``text``."""
        self.edits.append(Edit(offset, offset, text, index))

    def mark(self, index: int, offset: int, text: str) -> None:
        """Plan a marker; ``text`` consists of comment lines and newlines, and ``diff`` omits it."""
        self.edits.append(Edit(offset, offset, text, index, marker=True))

    def marker(self, index: int, label: str, target: str | None = None) -> str:
        """A marker comment, without indentation and newline."""
        step = self.steps[index]
        reason = f": {step.reason}" if step.reason else ""
        return marker_comment(label, f"{target or step.target}{reason} ({step.config.name})")

    def finished(self, newline: str, *, markers: bool = True) -> list[Edit]:
        """The edits with the source's line endings, also correct after a last line without a newline.

        Args:
            newline: the line ending.
            markers: whether the copies of methods contain markers.
        """
        source = self.document.source
        unfinished = bool(source) and not source.endswith(("\n", "\r"))
        lines = [replace(edit, text=edit.text.replace("\r\n", "\n")) for edit in self.edits]
        lines = [replace(edit, text=wrapped(edit.text)) if edit.marker else edit for edit in lines]
        done = []
        for edit in with_copies(self.document, lines, markers=markers):
            text = edit.text.replace("\r\n", "\n").replace("\n", newline)
            if unfinished and edit.start == edit.end == len(source) and text.endswith(newline):
                text = newline + text.removesuffix(newline)
            done.append(replace(edit, text=text))
        return done
