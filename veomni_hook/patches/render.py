"""The output forms of a patched module: the stored file, the dump, and the diff.

The stored file is header plus text. A dump has the same lines with absolute imports, and the command that
makes it. The diff omits header, markers and import rewriting. All depend on their inputs alone: no dates, no
local paths.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from textwrap import wrap
from typing import TYPE_CHECKING

from veomni_hook.patches.code.document import NEWLINE, Document
from veomni_hook.patches.code.edit import one_line
from veomni_hook.patches.code.imports import absolute_imports
from veomni_hook.patches.report import AppliedPatch, PatchReport, YieldedPatch

if TYPE_CHECKING:
    from veomni_hook.patches.engine import PatchedSource

__all__ = ["MADE_BY", "dump_text", "header", "made_by", "unified_diff", "with_header"]

#: In the header of a dump, before the command that makes it.
MADE_BY = "# Made by:    "
_SEE = "# See what changed: "
_ROUTE = "route"
_WIDTH = 110
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


def with_header(patched: PatchedSource, patch_hash: str, *, standalone: bool = False) -> str:
    """Return the text of the stored file: header, then patched text with markers."""
    first = NEWLINE.search(patched.text)
    newline = first.group() if first else "\n"
    lines = header(patched.report, patch_hash, standalone=standalone)
    return "".join(f"{line}{newline}" for line in lines) + patched.text


def header(report: PatchReport, patch_hash: str, *, standalone: bool = False) -> list[str]:
    """Return the header's lines, without newlines; every line is a comment.

    Their number is the line offset between ``PatchedSource.text`` and the stored file.

    Args:
        report: what was done.
        patch_hash: identifies the patched form.
        standalone: whether the file does without this package; what is missed is upstream's code in it.
    """
    routes = [patch for patch in report.applied if patch.kind == _ROUTE]
    homes = {patch.config for patch in routes}
    others = [patch for patch in report.applied if patch.config not in homes]
    lines = [
        f"# Made by veomni-hook from {report.module}. It runs without veomni-hook."
        if standalone
        else f"# Patched in memory by veomni-hook from {report.module}.",
        "# Do not edit: this file is made anew from the installed source and the patches below.",
        "#",
        f"# Source:     {report.module} ({report.distribution} {report.version})",
        f"# Patch hash: {patch_hash}",
        f"{_SEE}veomni-hook diff {report.module}",
        "#",
    ]
    if others or not routes:
        lines.append(f"# Patches applied: {len(others)}")
        lines += _listed(map(_entry, others))
    if routes:
        what = "Formulas as functions at the end" if standalone else "Routed to kernel slots"
        lines.append(f"# {what}: {len(routes)}")
        lines += _listed(_by_formula((f"{patch.op}/{patch.variant}", patch.target) for patch in routes))
    if report.yielded:
        lines.append(f"# Built-in patches that gave way: {len(report.yielded)}")
        lines += _listed(map(_entry, report.yielded))
    if report.remarks:
        lines.append(f"# Remarks on configs: {len(report.remarks)}")
        lines += _listed(f"{remark.target}: {remark.what} ({remark.config})" for remark in report.remarks)
    if report.missed and standalone:
        lines.append(
            f"# Upstream's code, which veomni-hook routes to kernels or changes: {len(report.missed)}"
        )
        lines += _listed(_by_formula((site.op, site.target) for site in report.missed))
    elif report.missed:
        lines.append(f"# Not routed, though it looks like a kernel's code: {len(report.missed)}")
        lines += _listed(f"{site.op} {site.target}: {site.reason or site.status}" for site in report.missed)
    return [*(part for line in lines for part in _folded(line)), "#"]


def _folded(line: str) -> list[str]:
    """Wrap a comment line; continuation lines of a list entry are indented to its text."""
    indent = "#     " if line.startswith("#   - ") else "#   "
    return wrap(line, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _by_formula(places: Iterable[tuple[str, str]]) -> Iterator[str]:
    """One entry per formula or op, with all of its targets."""
    targets: dict[str, list[str]] = {}
    for formula, target in places:
        targets.setdefault(formula, []).append(target)
    return (f"{formula}: {', '.join(dict.fromkeys(names))}" for formula, names in targets.items())


def _listed(entries: Iterable[str]) -> Iterator[str]:
    return (f"#   - {one_line(entry)}" for entry in entries)


def dump_text(stored: str, module: str) -> str:
    """Return the stored file with every relative import made absolute, and with the same line numbers.

    No line is split, so line numbers in tracebacks stay valid; an upstream import may exceed 120 columns.

    Args:
        stored: the text of the stored file (or any other form of the module).
        module: the module's name; it must be a module, not a package.

    Raises:
        PatchError: an import reaches beyond the top-level package.
        SyntaxError: ``stored`` is not valid Python.
    """
    return absolute_imports(Document(stored, module), module)


def made_by(text: str, command: str) -> str:
    """Return a file with the command that makes it in its header; the number of lines stays."""
    head, see, rest = text.partition(_SEE)
    line = _LINE.match(rest)
    return f"{head}{MADE_BY}{command}{rest[len(line.group().rstrip()) :]}" if see and line else text


def unified_diff(original: str, patched: PatchedSource, module: str) -> str:
    """Return the unified diff from the installed original to the patched text without markers.

    Empty if nothing differs. Every hunk belongs to an applied patch.
    """
    report = patched.report
    lines = difflib.unified_diff(
        _LINE.findall(original),
        _LINE.findall(patched.plain),
        fromfile=f"{module} ({report.distribution} {report.version})",
        tofile=f"{module} (patched by veomni-hook)",
    )
    return "".join(
        line if line.endswith(("\n", "\r")) else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def _entry(patch: YieldedPatch | AppliedPatch) -> str:
    if patch.kind == _ROUTE:
        return f"[{patch.kind}] {patch.target}: {patch.op}/{patch.variant}: {patch.reason}"
    return f"[{patch.kind}] {patch.target}: {patch.reason} ({patch.config})"
