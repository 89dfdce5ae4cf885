"""`veomni_hook.explain`, and what it returns: rows, as text, in a terminal, in a notebook, or as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from shutil import get_terminal_size
from types import ModuleType
from typing import TYPE_CHECKING, Any, overload

from veomni_hook.errors import KernelError
from veomni_hook.kernels.explain.collect import rows_of_model, rows_of_module
from veomni_hook.kernels.explain.rows import Group, Row, grouped
from veomni_hook.kernels.explain.summary import summary
from veomni_hook.kernels.slot.liger_warning import warn_of_stacked
from veomni_hook.layout import counted, paragraphs
from veomni_hook.printable import printable
from veomni_hook.tools.report.batch_invariance import notes_on_invariance
from veomni_hook.tools.report.class_mapping import notes_on_mapped
from veomni_hook.tools.report.live import live_page
from veomni_hook.tools.report.memory import notes_on_memory
from veomni_hook.tools.report.page import text
from veomni_hook.tools.report.parallel import notes_on, notes_on_experts
from veomni_hook.tools.report.precision import notes_on_precision
from veomni_hook.tools.report.trainers import beside_trainers, notes_on_trainers

if TYPE_CHECKING:
    from torch import nn

    from veomni_hook.tools.report.memory_plan import MemoryPlan

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True, repr=False)
class Explanation:
    """The rows of a model or module; equal rows are printed once, with a count.

    ``modules`` are the modeling modules that define its classes, ``notes`` lines on what processes
    share, on the settings `memory` and `precision`, on classes that transformers' own registry has
    replaced, and on batch invariance. ``plan`` is the predicted memory of a step, if it was asked for.
    """

    subject: str
    rows: tuple[Row, ...]
    modules: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    plan: MemoryPlan | None = None

    def groups(self) -> list[Group]:
        """Return the rows as they are printed: places with the same content are one group."""
        return grouped(self.rows)

    def __str__(self) -> str:
        if not self.rows:
            alone = (
                f"{self.subject}: no kernel slots; its modeling code is not patched."
                " veomni_hook.adopt(model) patches a model that is loaded."
            )
            lines = [alone, *(f"  {note}" for note in self.notes)]
        else:
            lines = [f"{self.subject}:", *(f"  {group}" for group in self.groups()), *self._apart()]
        return printable("\n".join(lines if self.plan is None else [*lines, str(self.plan)]))

    def __repr__(self) -> str:
        """Return the printed text, wrapped at words to the width of the terminal."""
        width = max(get_terminal_size((80, 24)).columns, 20)
        return paragraphs(str(self), width, indent=4)

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        heads = ("class", "places", "op", "backend", "why", "calls")
        body = [(one.kind, one.places, one.op, one.backend, one.why, one.calls) for one in self.groups()]
        told = self._apart() if self.rows else [str(self)]
        return "".join(
            [
                f"<table><caption>{text(self.subject)}</caption>",
                f"<thead><tr>{_cells('th', heads)}</tr></thead><tbody>",
                *(f"<tr>{_cells('td', row)}</tr>" for row in body),
                "</tbody></table>",
                *(f"<p>{text(line.strip())}</p>" for line in told),
                *([] if self.plan is None else [f"<pre>{text(str(self.plan))}</pre>"]),
            ]
        )

    @overload
    def to_html(self, path: None = None) -> str: ...

    @overload
    def to_html(self, path: str | PathLike[str]) -> None: ...

    def to_html(self, path: str | PathLike[str] | None = None) -> str | None:
        """Return a page about the model as one HTML document, or write it to a file.

        The page shows, for each place, what ran, why, and the counted calls; what was not routed; and the
        upstream source next to the patched source. It is the page of `veomni-hook report`. It needs no
        network and contains no script.

        Args:
            path: the file to write or overwrite; by default nothing is written.

        Returns:
            The document if ``path`` is None; else None, so that a notebook does not print it.

        Raises:
            OSError: the file cannot be written.
        """
        notes = [line.strip() for line in self._apart()]
        document = live_page(self.subject, self.rows, self.modules, notes=notes)
        if path is None:
            return document
        Path(path).write_text(document, encoding="utf-8")
        return None

    def _apart(self) -> list[str]:
        """Count the places for which no machine has a kernel; add the notes, and the sentence about all."""
        count = sum(not row.supplied for row in self.rows)
        none = [f"  {count} of {counted(len(self.rows), 'place')}: no machine has a kernel"] if count else []
        return [*none, *(f"  {note}" for note in self.notes), *([summary(self.rows)] if self.rows else [])]


def explain(
    target: nn.Module | ModuleType, *, device: str | None = None, plan: Mapping[str, Any] | None = None
) -> Explanation:
    """Return what each kernel slot of ``target`` last did, and why.

    ``target`` is a model (any ``nn.Module``) or an imported modeling module. Slots that have not been asked
    yet report what they would select for tensors on ``device`` (default: the device of the model's first
    parameter, or the CPU). Warns once per process if Liger's functions replace patched code. Raises
    KernelError if ``target`` is neither.

    With ``plan``, the result's ``plan`` is the memory of a training step on ``device``, predicted without
    running it: ``batch`` and ``length`` of the sequences, or ``inputs``, the keyword arguments of a batch;
    ``optimizer``, one of `torch.optim` or its name (default: ``adamw``; None: none); ``memory``, what a step
    may take, as in ``80GiB`` (default: what the GPU has); ``reach``, a length to reach with other settings.
    Raises PredictionError if it cannot be predicted.
    """
    warn_of_stacked(target)
    if isinstance(target, ModuleType):
        rows = rows_of_module(target, device or "cpu")
        return Explanation(target.__name__, tuple(rows), (target.__name__,))
    if not callable(getattr(target, "named_modules", None)):
        raise KernelError(
            f"a {type(target).__name__} has no kernel slots",
            where="explain",
            fix="pass a model or a modeling module",
        )
    parameter = next(iter(target.parameters()), None)
    device = device or ("cpu" if parameter is None else parameter.device.type)
    rows = beside_trainers(rows_of_model(target, device), target)
    notes = (
        *notes_on(target),
        *notes_on_experts(target),
        *notes_on_memory(target),
        *notes_on_precision(target),
        *notes_on_mapped(target),
        *notes_on_trainers(target),
        *notes_on_invariance(target, rows, device),
    )
    homes = dict.fromkeys(type(module).__module__ for module in target.modules())
    modeling = [home for home in homes if home.rpartition(".")[2].startswith("modeling_")]
    modules = tuple(dict.fromkeys([*modeling, *(row.module for row in rows)]))
    memory = None
    if plan is not None:
        from veomni_hook.tools.report.memory_plan import asked

        memory = asked(target, plan, device)
    return Explanation(type(target).__name__, tuple(rows), modules, notes, memory)


def _cells(tag: str, values: Sequence[object]) -> str:
    return "".join(f"<{tag}>{text(value)}</{tag}>" for value in values)
