"""A plan: the steps that the configs of one module declare, and the edits that carry them out.

Every edit carries the index of its step, so the report can assign the lines of the result to steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from veomni_hook.errors import PatchError, PatchTargetError
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.edit import Edit, marker_comment, reindent
from veomni_hook.patches.code.nearest_names import listed, nearest
from veomni_hook.patches.code.wrap import wrapped
from veomni_hook.patches.report import Remark
from veomni_hook.patches.routes.compose import with_copies
from veomni_hook.patches.site import Site
from veomni_hook.patches.spec import Patch, PatchConfig

__all__ = ["Origin", "Plan", "Step", "Task"]

E = TypeVar("E", bound=PatchError)


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
    def site(self) -> Site | None:
        """The site that a route was made from."""
        return self.payload.site if isinstance(self.payload, Patch) else None

    @property
    def formula(self) -> tuple[str, str]:
        """The op and the variant of a route, else empty."""
        return (self.site.op, self.site.variant) if self.site is not None else ("", "")

    @property
    def declaration(self) -> str:
        """The line that declares it, and the config; for errors."""
        return f"declared in {self.config.place_of(self.payload)} ({self.config.name}{self.config.announced})"

    def __str__(self) -> str:
        formula = f" {'/'.join(self.formula)}" if self.site is not None else ""
        return f"{self.kind}{formula} of {self.target}"


@dataclass(eq=False)
class Task:
    """A step while its verb carries it out: it plans edits, and its errors name its place and target.

    ``kind`` is that under which the step is reported (an override may add). An ``idle`` one has no effect,
    because of something that a remark tells.
    """

    plan: Plan = field(repr=False)
    index: int
    step: Step
    kind: str
    idle: bool = False

    @property
    def document(self) -> Document:
        """The module that is patched."""
        return self.plan.document

    @property
    def target(self) -> str:
        """The step's target."""
        return self.step.target

    @property
    def patch(self) -> Patch:
        """The step's patch, see `Step.patch`."""
        return self.step.patch

    @property
    def where(self) -> str:
        """The module, and where the step is declared; for errors."""
        return f"{self.plan.origin}; {self.step.declaration}"

    @property
    def place(self) -> dict[str, str]:
        """The fields of an error that say where it is, for functions that know no tasks."""
        return {"where": self.where, "target": self.target}

    def error(self, kind: type[E], what: str, fix: str, **more: Any) -> E:
        """Return an error of the step."""
        return kind(what, fix=fix, **{**self.place, **more})

    def missing(
        self, what: str, fix: str, name: str, known: Iterable[str], **more: object
    ) -> PatchTargetError:
        """Return the error for a name that is not there; ``fix`` goes on with the nearest ``known`` ones."""
        close = nearest(name, known)
        return self.error(PatchTargetError, what, f"{fix}: {listed(close)}", nearest=close, **more)

    def tolerate(self, error: PatchError, *, instead: str = "") -> None:
        """Record an error of the step as a remark if its config is lenient.

        Args:
            error: the error.
            instead: what happens now, if the step does not simply go on.

        Raises:
            PatchError: ``error`` itself, if the config is not lenient.
        """
        if not self.step.config.lenient:
            raise error
        what = f"{error.what}; {instead}" if instead else error.what
        self.plan.remarks.append(Remark(self.step.config.name, self.target, what, error.where, error.fix))

    def add(self, *edits: Edit, beside: Iterable[Task] = ()) -> None:
        """Plan edits that carry out this task and those ``beside`` it (two names dropped from one import)."""
        also = frozenset(task.index for task in beside)
        self.plan.edits += (replace(edit, patch=self.index, also=also) for edit in edits)

    def change(self, start: int, end: int, text: str) -> None:
        """Plan to replace a range of the source with ``text``."""
        self.add(Edit(start, end, text))

    def insert(self, offset: int, text: str) -> None:
        """Plan to insert ``text``."""
        self.change(offset, offset, text)

    def mark(self, offset: int, text: str) -> None:
        """Plan a marker; ``text`` consists of comment lines and newlines, and ``diff`` omits it."""
        self.add(Edit(offset, offset, text, marker=True))

    def append(self, offset: int, text: str, marker: str = "", *, indent: str = "", gap: int = 1) -> None:
        """Plan to insert lines after the one that ends at ``offset``: empty ones, the marker, the text."""
        if gap:
            self.insert(offset, "\n" * gap)
        if marker:
            self.mark(offset, f"\n{indent}{marker}")
        self.insert(offset, "\n" + (reindent(text, "", indent) if indent else text))

    def marker(self, label: str, target: str | None = None) -> str:
        """A marker comment, without indentation and newline."""
        reason = f": {self.step.reason}" if self.step.reason else ""
        return marker_comment(label, f"{target or self.target}{reason} ({self.step.config.name})")


@dataclass
class Plan:
    """The edits of one module, as the verbs collect them.

    ``gone`` are the names that no code may use any more, with what removes them; ``remarks`` tell what is
    wrong with lenient configs; ``wanting`` are modules of external replacements that are not installed.
    """

    document: Document
    origin: Origin
    steps: Sequence[Step]
    edits: list[Edit] = field(default_factory=list)
    gone: dict[str, Task] = field(default_factory=dict)
    remarks: list[Remark] = field(default_factory=list)
    wanting: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tasks = [Task(self, index, step, step.kind) for index, step in enumerate(self.steps)]

    def of_kind(self, *kinds: str) -> list[Task]:
        """The tasks of these declared kinds, in order."""
        return [task for task in self.tasks if task.step.kind in kinds]

    def finished(self, *, markers: bool = True) -> list[Edit]:
        """The edits with the source's line endings, also correct after a last line without a newline.

        Args:
            markers: whether the copies of methods contain markers.
        """
        source, newline = self.document.source, self.document.newline
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
