import pytest

from veomni_hook.patches.code.document import Document
from veomni_hook.patches.engine import Origin
from veomni_hook.patches.plan import Plan, Step
from veomni_hook.patches.spec import PatchConfig

ORIGIN = Origin("pkg.upstream", "/site/pkg/upstream.py", "pkg", "1.0")


def plan(source):
    config = PatchConfig("pkg.upstream", label="cfg:config")
    return Plan(Document(source), ORIGIN, [Step("helper", "h", "line\n  @break", config)])


def test_markers_are_one_line():
    assert plan("").tasks[0].marker("HELPER") == "# [HELPER] h: line break (cfg:config)"


def test_line_endings_become_the_sources():
    made = plan("a\r\nb\r\n")
    made.tasks[0].insert(3, "x\ny\r\n")
    assert [edit.text for edit in made.finished("\r\n")] == ["x\r\ny\r\n"]


def test_whole_lines_at_the_end_of_an_unfinished_text():
    made = plan("a")
    made.tasks[0].insert(1, "x\n")
    made.tasks[0].insert(1, ")")
    assert [edit.text for edit in made.finished("\n")] == ["\nx", ")"]


def test_where_names_module_and_config():
    where = plan("").tasks[0].where
    assert where.startswith("pkg.upstream (pkg 1.0, /site/pkg/upstream.py); declared in ")
    assert "test_plan.py:" in where and where.endswith(" (cfg:config)")


def test_a_step_without_patch_says_so():
    with pytest.raises(TypeError, match="helper"):
        _ = plan("").steps[0].patch
