"""Names with commands to a terminal reach nobody: not in reports, tables, errors, warnings, logs or pages."""

import logging

import pytest

from veomni_hook import layout
from veomni_hook.adoption.report import Adoption, Entry
from veomni_hook.errors import KernelError, VeomniHookWarning
from veomni_hook.finders import log
from veomni_hook.finders.outcome import Outcome, Status
from veomni_hook.kernels.explain.rows import Row
from veomni_hook.printable import printable
from veomni_hook.tools.cli import output
from veomni_hook.tools.report.explanation import Explanation
from veomni_hook.tools.report.page import text

#: Sets the title of a window, goes to the start of the line, turns the order round.
BAD = "\x1b]0;title\x07\rred\x9b31m\u202e"
SHOWN = r"\u001b]0;title\u0007\u000dred\u009b31m\u202e"


def _row():
    return Row(BAD, BAD, BAD, "op", "variant", "torch", BAD, BAD, called=True)


def _adoption():
    entry = Entry(BAD, BAD, 1, BAD, BAD, ())
    adoption = Adoption.__new__(Adoption)
    vars(adoption).update(
        model=BAD, off="", adopted=[entry], before=[entry], refused=[entry], shared={BAD: [BAD]}
    )
    return adoption


PLACES = {
    "error": lambda: str(KernelError(BAD, where=BAD, fix=BAD)),
    "warning": lambda: str(VeomniHookWarning(BAD)),
    "table": lambda: str(layout.table(["name"], [[BAD]])),
    "narrow table": lambda: str(layout.table(["name", "x", "y"], [[BAD, "x" * 40, "y" * 40]], 40)),
    "fields": lambda: layout.fields({"name": BAD}),
    "paragraphs": lambda: layout.paragraphs(BAD),
    "outcome": lambda: repr(Outcome(module=BAD, patched=False, reason=BAD)),
    "status": lambda: repr(Status(True, {BAD: Outcome(module=BAD, patched=False, reason=BAD)})),
    "explanation": lambda: str(Explanation(BAD, (_row(),), notes=(BAD,))),
    "explanation of nothing": lambda: str(Explanation(BAD, ())),
    "explanation in a terminal": lambda: repr(Explanation(BAD, (_row(),))),
    "explanation in a notebook": lambda: Explanation(BAD, (_row(),), notes=(BAD,))._repr_html_(),
    "adoption": lambda: repr(_adoption()),
    "page": lambda: text(BAD),
}


@pytest.mark.parametrize("place", PLACES)
def test_commands_are_shown_and_not_given(place):
    told = PLACES[place]()
    assert SHOWN in told.replace("\\\\", "\\")
    assert told == printable(told)


def test_lines_on_standard_error(capsys):
    for say in (
        log.say,
        output.note,
        output.warn,
        lambda told: output.fail(KernelError(told, where="", fix="")),
    ):
        say(BAD)
        told = capsys.readouterr().err
        assert SHOWN in told and told == printable(told)


def test_the_log(caplog):
    caplog.set_level(logging.INFO, "veomni_hook")
    for say in (log.note, log.say):
        say(BAD + "%s")
    assert [record.getMessage() for record in caplog.records] == [SHOWN + "%s"] * 2


def test_other_text_stays():
    ordinary = "größer\n\tλ 変換 \N{GRINNING FACE}"
    assert printable(ordinary) == ordinary
