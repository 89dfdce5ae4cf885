"""Change the indentation of code without changing the text inside its strings."""

from __future__ import annotations

import io
import tokenize

__all__ = ["reindent", "string_lines"]


def string_lines(text: str) -> set[int]:
    """Numbers, from 1, of the lines that begin inside a string, including replacement fields of f-strings.

    Args:
        text: valid Python at the indentation of its first line.
    """
    inside: set[int] = set()
    opened: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind.endswith("STRING_START"):
            opened.append(token.start[0])
        elif kind.endswith("STRING_END"):
            inside.update(range(opened.pop() + 1, token.end[0] + 1))
        elif kind == "STRING":
            inside.update(range(token.start[0] + 1, token.end[0] + 1))
    return inside


def reindent(text: str, old: str, new: str) -> str:
    """Replace the indentation ``old`` by ``new`` in every line of ``text`` that is not inside a string.

    The first line counts as indented by ``old`` even if its indentation is missing. Lines that are indented
    less (comments, code in brackets) get the indentation ``new``; blank lines become empty. Line endings
    become ``\\n``.
    """
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    if not lines[0].startswith(old):
        lines[0] = old + lines[0].lstrip(" \t\f")
    # The tokenizer requires a first line without indentation; lines inside strings must not change.
    inside = string_lines("if 1:\n" + "\n".join(lines) if old else "\n" + "\n".join(lines))
    moved = []
    for number, line in enumerate(lines, start=2):
        if number in inside:
            moved.append(line)
            continue
        bare = line.lstrip(" \t\f")
        # A form feed resets the column to zero.
        shown = line[line.rfind("\f", 0, len(line) - len(bare)) + 1 :]
        if not bare.strip():
            moved.append("")
        else:
            moved.append(new + (shown[len(old) :] if shown.startswith(old) else bare))
    return "\n".join(moved)
