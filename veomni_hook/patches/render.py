"""The output forms of a patched module: the stored file, the dump, and the diff.

The stored file is header plus text. A dump has the same lines with absolute imports. The diff omits header,
markers and import rewriting. All depend on their inputs alone: no dates, no local paths.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from textwrap import wrap
from typing import TYPE_CHECKING

from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.edit import one_line
from veomni_hook.patches.code.imports import absolute_imports
from veomni_hook.patches.report import AppliedPatch, PatchReport, YieldedPatch

if TYPE_CHECKING:
    from veomni_hook.patches.engine import PatchedSource

__all__ = ["dump_text", "header", "unified_diff", "with_header"]

_ROUTE = "route"
_WIDTH = 110
_NEWLINE = re.compile(r"\r\n|\r|\n")
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


def with_header(patched: PatchedSource, patch_hash: str) -> str:
    """Return the text of the stored file: header, then patched text with markers."""
    first = _NEWLINE.search(patched.text)
    newline = first.group() if first else "\n"
    return "".join(f"{line}{newline}" for line in header(patched.report, patch_hash)) + patched.text


def header(report: PatchReport, patch_hash: str) -> list[str]:
    """Return the header's lines, without newlines; every line is a comment.

    Their number is the line offset between ``PatchedSource.text`` and the stored file.
    """
    routes = [patch for patch in report.applied if patch.kind == _ROUTE]
    homes = {patch.config for patch in routes}
    others = [patch for patch in report.applied if patch.config not in homes]
    lines = [
        f"# Patched in memory by veomni-hook from {report.module}.",
        "# Do not edit: this file is made anew from the installed source and the patches below.",
        "#",
        f"# Source:     {report.module} ({report.distribution} {report.version})",
        f"# Patch hash: {patch_hash}",
        f"# See what changed: veomni-hook diff {report.module}",
        "#",
    ]
    if others or not routes:
        lines.append(f"# Patches applied: {len(others)}")
        lines += _listed(map(_entry, others))
    if routes:
        lines.append(f"# Routed to kernel slots: {len(routes)}")
        lines += _listed(_routed(routes))
    if report.yielded:
        lines.append(f"# Built-in patches that gave way: {len(report.yielded)}")
        lines += _listed(map(_entry, report.yielded))
    if report.remarks:
        lines.append(f"# Remarks on configs: {len(report.remarks)}")
        lines += _listed(f"{remark.target}: {remark.what} ({remark.config})" for remark in report.remarks)
    if report.missed:
        lines.append(f"# Not routed, though it looks like a kernel's code: {len(report.missed)}")
        lines += _listed(f"{site.op} {site.target}: {site.reason or site.status}" for site in report.missed)
    return [*(part for line in lines for part in _folded(line)), "#"]


def _folded(line: str) -> list[str]:
    """Wrap a comment line; continuation lines of a list entry are indented to its text."""
    indent = "#     " if line.startswith("#   - ") else "#   "
    return wrap(line, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _routed(routes: list[AppliedPatch]) -> Iterator[str]:
    """One entry per formula, with everything routed to it."""
    targets: dict[str, list[str]] = {}
    for patch in routes:
        targets.setdefault(f"{patch.op}/{patch.variant}", []).append(patch.target)
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
