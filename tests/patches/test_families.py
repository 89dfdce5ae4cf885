"""The patched text of the installed families: markers at their statements, lines within 120 columns."""

import pytest

from tests.patches.upstream import ROOT, modeling_files
from veomni_hook.patches.code.wrap import WIDTH
from veomni_hook.patches.engine import Origin, patch_source
from veomni_hook.patches.render import header

#: Guards of every op, one in the else of another, expressions in decorators, edits in long lines.
FAMILIES = (
    "afmoe", "beam", "deepseek_v3", "flava", "gemma3", "gemma3n", "glm4_moe", "gpt_oss", "jamba", "llama",
    "qwen3", "qwen3_moe",
)  # fmt: skip
_MODULES = ("modeling_layers", "modeling_utils", "configuration_utils", "masking_utils")


def modules(families):
    for path in sorted([*modeling_files(), *(ROOT / f"{name}.py" for name in _MODULES)]):
        if not families or path.parent.name in families:
            yield ".".join(("transformers", *path.relative_to(ROOT).with_suffix("").parts)), path


def _indent(line):
    return len(line) - len(line.lstrip())


def misplaced(upstream, patched):
    """Markers that are not at the column of the statement below them."""
    known, lines = set(upstream.split("\n")), patched.text.split("\n")
    found = []
    for number, line in enumerate(lines):
        if line.lstrip().startswith("# [") and line not in known:
            below = next(each for each in lines[number + 1 :] if each.strip() and each.lstrip()[0] != "#")
            if _indent(line) != _indent(below):
                found.append(f"{number + 1}: {line}\n{below}")
    return found


def too_long(upstream, patched):
    """Inserted lines that are too long.

    Upstream's own lines do not change except for their indentation, also inside the ``else`` of a guard, so a
    long one may become longer.
    """
    known = {line.strip() for line in upstream.split("\n")}
    lines = [*header(patched.report, "0" * 16), *patched.text.split("\n")]
    return [line for line in lines if len(line) > WIDTH and line.strip() not in known]


@pytest.mark.parametrize("families", [FAMILIES, pytest.param((), marks=pytest.mark.slow, id="all")])
def test_dumps_are_fit_to_be_read(families):
    found = list(modules(families))
    # beam was added after 5.2.0.
    assert len(found) >= (len(families) - 1 if families else 350)
    markers = 0
    for module, path in found:
        upstream = path.read_text("utf-8")
        patched = patch_source(upstream, [], Origin(module, str(path), "transformers", "0"), idioms=True)
        assert not misplaced(upstream, patched), module
        assert not too_long(upstream, patched), module
        markers += patched.text.count("# [ROUTED]")
    assert markers > (60 if families else 1000)
