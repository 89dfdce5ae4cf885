import ast
import re
from pathlib import Path
from typing import Any

import pytest

import veomni_hook
from tests.patches.upstream import modeling_files
from veomni_hook.finders.build import stored_form
from veomni_hook.patches import reasons
from veomni_hook.patches.engine import PatchedSource
from veomni_hook.patches.graph import Difference, Scope, canonical
from veomni_hook.patches.idioms.recognise import OPTIONAL
from veomni_hook.patches.reasons import Code, Reason, remedies
from veomni_hook.patches.report import MissedSite, PatchReport
from veomni_hook.patches.site import Missed
from veomni_hook.tools.coverage import ROUTED, examine

#: Ops whose code the interpreter follows: only it may leave code that is not followed.
READ = {
    *("attention", "gated_mlp", "hyper_connection", "layer_norm", "load_balancing_loss", "log_decay"),
    *("layer_loop", "moe_experts", "rms_norm", "rotary", "row_merge", "tiles"),
}
#: Families that have sites with many of the codes.
SOME = ("align", "bamba", "dbrx", "dinat", "gemma3n", "xmod")


def test_a_reason_is_its_text_and_knows_cause_and_line():
    plain = Reason("it is odd")
    assert (plain, plain.code, plain.line) == ("it is odd", Code.NOT_FOLLOWED, 0)
    told = Reason("it is odd", Code.IN_PLACE, 3)
    assert (told, told.code, told.line) == ("it is odd (line 3)", Code.IN_PLACE, 3)
    assert Reason("nearest is a: it is odd (line 7)").line == 7
    assert Reason("several losses (lines 4 and 9)").line == 4
    assert Reason("another loop at line 9 (line 4)").line == 4 and Reason("replaced at line 9").line == 9


def test_a_reason_keeps_its_cause():
    odd = Reason("it is odd", Code.IN_PLACE)
    assert Reason(odd, Code.RANDOM, 4).code is Code.IN_PLACE and Reason(odd, line=4) == "it is odd (line 4)"
    assert Missed(odd, ast.parse("x").body[0], Code.RANDOM).reason.code is Code.IN_PLACE
    both = Reason.joined([Reason(odd, line=4), "it is even"])
    assert (both, both.code, both.line) == ("it is odd (line 4); it is even", Code.IN_PLACE, 4)
    assert Reason.joined([]) == ""
    behind = odd.after("nearest is a")
    assert (behind, behind.code) == ("nearest is a: it is odd", Code.IN_PLACE)


def test_what_the_reader_says_becomes_a_reason():
    function = ast.parse("def f(x):\n    while x: x = x - 1\n    return x\n").body[0]
    unknown, other = (
        canonical(function, Scope(ast.Module([function]))),
        Difference("expected +, found - (line 6)", 0.5).why,
    )
    assert (unknown, unknown.code) == ("While is not followed (line 2)", Code.NOT_FOLLOWED)
    assert (other.code, other.line) == (Code.OTHER_FORM, 6)


def test_the_table_has_sentences_and_remedies_are_told_once():
    assert 12 <= len(Code) <= 25
    said = [(code.meaning, code.remedy) for code in Code]
    assert all(re.fullmatch(r"[A-Z`].*\.", sentence) for both in said for sentence in both)
    assert len({meaning for meaning, _ in said}) == len(Code)
    assert remedies(["replaced", "", "in_place", "replaced"]) == [
        ("in_place", Code.IN_PLACE.remedy),
        ("replaced", Code.REPLACED.remedy),
    ]


def test_every_code_is_the_cause_of_some_reason():
    package = Path(veomni_hook.__file__).parent
    files = [path for path in package.rglob("*.py") if path != Path(reasons.__file__)]
    text = "\n".join(path.read_text("utf-8") for path in files)
    named = {Code[name] for name in re.findall(r"\bCode\.([A-Z_]+)\b", text)} | {Code.NOT_FOLLOWED}
    assert {*Code} == named


@pytest.mark.parametrize("families", [SOME, pytest.param((), marks=pytest.mark.slow, id="all")])
def test_every_site_that_is_not_routed_has_a_code(families):
    left = [row for row in rows(families) if row.status != ROUTED]
    assert {row.code for row in left} <= {str(code) for code in Code}
    assert {row.op for row in left if row.code == "not_followed"} <= READ
    assert len({row.code for row in left}) > 4, "other families show more codes"
    assert all(f" {row.line}" in row.reason for row in left if row.line)
    assert not [row for row in left if " line " in row.reason and not row.line]


def rows(families):
    files = [path for path in modeling_files() if not families or path.parent.name in families]
    assert files
    return [row for path in files for row in examine(path.stem, path.read_text("utf-8"), optional=OPTIONAL)]


def test_the_cause_of_a_miss_is_no_part_of_the_form():
    def named(*cause: Any, reason: str = "it is odd (line 3)") -> str:
        report = PatchReport("m", "1", missed=(MissedSite("op", "f", "missed", reason, *cause),))
        return stored_form(PatchedSource("x = 1\n", "x = 1\n", report)).patch_hash

    assert named("in_place", 3) == named("not_followed", 0) != named("in_place", 3, reason="it is even")
