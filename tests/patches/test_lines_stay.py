"""Upstream's lines stay where they are: tools that search the source of a method find them.

What may change is a call, in place. Everything else is inserted in whole lines.
"""

import ast
import importlib.metadata
import importlib.util
from unittest import mock

import pytest

from tests.patches.upstream import MODELS
from veomni_hook.patches import engine
from veomni_hook.patches.code.edit import apply_edits, place_edits
from veomni_hook.patches.plan import Origin

VERSION = importlib.metadata.version("transformers")
FAMILIES = ("llama", "qwen3", "qwen3_moe", "qwen3_5", "gemma3", "qwen3_vl", "deepseek_v4", "jetmoe", "bert")
#: Of 415,000 lines; 3,424 of transformers 5.23.0.
MOST_CHANGED = 3500


def edits_in_lines(path):
    """A module's text, and those of its edits that do not insert whole lines."""
    source = path.read_text(encoding="utf-8")
    origin = Origin(f"transformers.models.{path.parent.name}.{path.stem}", str(path), "transformers", VERSION)
    with mock.patch.object(engine, "place_edits", wraps=place_edits) as placing:
        engine.patch_source(source, [], origin, idioms=True)
    edits = placing.call_args.args[1] if placing.called else []
    return source, [edit for edit in edits if not inserts_lines(source, edit)]


def inserts_lines(source, edit):
    above = source[edit.start - 1 : edit.start] in ("", "\n") and edit.text.endswith("\n")
    below = source[edit.start : edit.start + 1] in ("", "\n") and edit.text.startswith("\n")
    return edit.inserts and (above or below)


def statements(text):
    """The kind and the column of each statement."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt):
            yield type(node).__name__, node.col_offset


def lines_changed(path):
    """How many of upstream's lines are not there any more; their statements must be."""
    source, edits = edits_in_lines(path)
    assert list(statements(source)) == list(statements(apply_edits(source, edits))), path.stem
    lines = (range(source.count("\n", 0, one.start), source.count("\n", 0, one.end) + 1) for one in edits)
    return len(set().union(*lines))


@pytest.mark.parametrize("family", FAMILIES)
def test_only_calls_change_in_place(family):
    for path in sorted(MODELS.glob(f"{family}/modeling_*.py")):
        assert lines_changed(path) <= 40


@pytest.mark.slow
def test_only_calls_change_in_place_in_all_models():
    assert sum(map(lines_changed, MODELS.glob("*/modeling_*.py"))) < MOST_CHANGED
