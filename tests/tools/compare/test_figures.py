"""Statistics of made-up runs, what is said about them, and the page that is drawn of them."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser

import pytest

from tests.tools.compare.made import STEADY, report, run, runs
from veomni_hook.tools.cli.compare import rows_of
from veomni_hook.tools.compare.charts import Line, chart
from veomni_hook.tools.compare.figures import loss_difference, side, warm
from veomni_hook.tools.compare.page import page_of
from veomni_hook.tools.compare.report import report_of
from veomni_hook.tools.compare.runs import Run, read
from veomni_hook.tools.compare.verdict import readable_time, tolerance


def test_the_warm_up_is_left_out_but_never_all() -> None:
    assert warm([9.0, 9.0, 1.0, 2.0, 3.0], 3) == [1.0, 2.0, 3.0]
    assert warm([9.0, 1.0], 3) == [1.0]
    assert warm([1.0], 20) == [1.0]
    assert warm([], 3) == []


def test_the_figures_of_one_side() -> None:
    found = side([run(False, 1, [9.0, 9.0, 1.0, 2.0, 3.0], [])], 3)
    assert (found.median, found.quartiles, found.counted) == (2.0, (1.5, 2.5), 3)
    assert found.tokens_a_second == 50.0
    assert (found.first_step, found.time_to_first, found.peak) == (1.0, 10.0, 2**30)
    unknown = run(False, 1, [1.0, 1.0], [])
    unknown.tokens = [100, None, 100]
    assert side([unknown], 1).tokens_a_second is None


@pytest.mark.parametrize(
    ("off", "on", "said", "sentence"),
    [
        ([STEADY, STEADY], [[0.7] * 8, [0.71] * 8], "faster", "takes 0.7"),
        ([[0.7] * 8, [0.71] * 8], [STEADY, STEADY], "slower", "takes 1.41 times as long"),
        ([STEADY, STEADY], [STEADY, STEADY], "same", "the same time to within"),
        ([[1.0] * 8, [1.3] * 8], [[1.0] * 8, [1.1] * 8], "noisy", "too noisy to tell"),
        ([[1.0] * 8, [1.66] * 8], [[2.3] * 8, [3.1] * 8], "noisy", "too noisy to tell"),
        ([[1.0] * 8, [1.1] * 8], [[0.5] * 8, [0.55] * 8], "faster", "takes 0.50 of the time"),
        ([[0.5, 1.5] * 4] * 2, [[0.6, 1.5] * 4] * 2, "noisy", "within the runs (the ratio is known"),
        ([STEADY, [1.0] * 9], [[0.7] * 12, [0.7] * 9], "faster", "takes 0.70 of the time"),
        ([STEADY], [[0.7] * 8], "faster", "fewer than two runs of each kind"),
        ([[]], [[]], "unknown", "Step times are unknown"),
        ([[1.0, 1.0, 1.0]], [[0.5, 0.5, 0.5]], "few", "Too few steps count"),
    ],
)
def test_what_is_said_of_the_step_time(off, on, said: str, sentence: str) -> None:
    found = report(off, on)
    assert found["time"]["verdict"] == said
    assert sentence in found["statement"]


@pytest.mark.parametrize(
    ("plain", "hooked", "own", "said", "sentence"),
    [
        ((2.0, 1.0), (2.0, 1.0), (2.0, 1.0), "agree", "are identical"),
        ((2.0, 1.0), (2.0, 1.00001), (2.0, 1.0), "agree", "agree (largest relative difference 1.0e-05)"),
        ((2.0, 1.0), (2.0, 1.01), (2.0, 1.009), "own noise", "within the script's own noise"),
        ((2.0, 1.0), (2.0, 1.5), (2.0, 1.6), "own noise", "a fixed seed"),
        ((2.0, 1.0), (2.0, 1.5), (2.0, 1.0), "differ", "losses DIFFER: by 3.3e-01 of their size at step 2"),
        ((2.0, 1.0), (2.0, math.nan), (2.0, 1.0), "differ", "DIFFER"),
        ((), (), (), "unknown", "the losses are unknown"),
    ],
)
def test_what_is_said_of_the_losses(plain, hooked, own, said: str, sentence: str) -> None:
    made = runs([STEADY] * 2, [STEADY] * 2, plain, hooked)
    made[2].losses = list(own)
    found = report_of(made, ["train.py"], 20, 3)
    assert found["loss"]["verdict"] == said
    assert found["ok"] == (said != "differ")
    assert sentence in found["statement"]
    json.dumps(found, allow_nan=False)


def test_low_precision_explains_larger_differences() -> None:
    assert tolerance("bfloat16") > tolerance("float32") == tolerance("")
    made = runs([STEADY] * 2, [STEADY] * 2, (2.0, 1.0), (2.0, 1.01))
    assert not report_of(made, [], 20, 3)["ok"]
    for one in made:
        one.facts["precision"] = "bfloat16"
    assert report_of(made, [], 20, 3)["ok"]


def test_losses_near_zero_are_compared_by_their_usual_size() -> None:
    one, other = run(False, 1, [1.0], [1.0, 1e-9]), run(True, 1, [1.0], [1.0, 2e-9])
    assert loss_difference([one], [other]).largest < 1e-6
    assert loss_difference([one]).largest is None


def test_a_failure_on_one_side_is_said() -> None:
    made = runs([STEADY], [STEADY])
    made[1].status, made[1].stopped, made[1].said = 3, False, ["ValueError: <no>"]
    found = report_of(made, ["train.py"], 20, 3)
    assert not found["ok"] and "with the hook, and not without it" in found["statement"]
    assert "ValueError: &lt;no&gt;" in page_of(found, rows_of(found))


def test_what_could_not_be_seen_is_said() -> None:
    made = [Run(False, 1), Run(True, 1, attached=True, facts={"backwards": 3})]
    found = report_of(made, ["train.py"], 20, 3)
    assert not found["ok"] and "Nothing can be compared" in found["statement"]
    assert "no process of it could be observed" in found["notes"][0]
    assert "calls of backward: 3" in found["notes"][1]
    made = runs([STEADY], [STEADY])
    made[1].facts |= {"kernels": [], "models": [], "model_called": True}
    assert "its model was gone" in report_of(made, [], 9, 3)["notes"][0]
    short = report(off=[STEADY], on=[STEADY])
    assert short["notes"][0] == "all runs: the script ended after 9 of 20 steps"


def test_tokens_are_those_of_all_ranks_and_the_rest_is_rank_0s(tmp_path) -> None:
    for rank in (1, 0):
        found = {
            "rank": rank,
            "world": 3,
            "stopped": True,
            "times": [1.0 + rank, 2.0],
            "first_call": None,
            "losses": [float(rank)] * 2,
            "tokens": [None, 10 + rank],
            "notes": [],
        }
        (tmp_path / f"result-{rank}-{rank}.json").write_text(json.dumps(found))
    seen = read(Run(False, 1), tmp_path)
    assert (seen.times, seen.losses, seen.tokens) == ([1.0, 2.0], [0.0, 0.0], [None, 21])
    assert seen.notes == ["2 of 3 ranks were observed; only their tokens count"]


class Balanced(HTMLParser):
    """Fails where an element is closed that is not the innermost one, and notes what the page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.found.append(tag)
        self.loaded += [value for name, value in attrs if name in ("src", "href", "srcset")]
        if tag not in ("meta", "br", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing() -> None:
    found = report([STEADY, STEADY], [[0.7] * 8] * 2, (2.0, 1.0), (2.0, 1.00001))
    text = page_of(found, rows_of(found))
    parser = Balanced()
    parser.feed(text)
    parser.close()
    assert parser.open == [] and all(place.startswith("#") for place in parser.loaded)
    assert parser.found.count("svg") == 3 and parser.found.count("table") == 3
    assert {"script", "link", "img", "style"} & set(parser.found) == {"style"}
    assert "Content-Security-Policy" in text
    assert "prefers-color-scheme: dark" in text and "url(" not in text
    assert "rms_<wbr>norm/<wbr>&lt;v&gt;" in text
    assert f'class="statement">{found["statement"]}' in text
    slower, other = report([[0.7] * 8], [STEADY]), report([STEADY], [STEADY], (2.0, 1.0), (2.0, 1.5))
    assert 'class="statement unsure"' in page_of(slower, rows_of(slower))
    assert 'class="statement bad"' in page_of(other, rows_of(other))


def test_a_chart_leaves_gaps_and_stays_inside() -> None:
    drawn = chart("t", [Line("a", "plain", [1.0, 2.0, None, 3.0])], str)
    assert [len(points) for _, points in drawn.curves] == [2, 1]
    assert not chart("t", [Line("a", "plain", [0.0, None])], str, log=True).ticks
    same = page_of(found := report([STEADY], [STEADY], (0.0,), (0.0,)), rows_of(found))
    assert "bit for bit" in same and "Nothing to draw" not in same
    logged = chart("t", [Line("a", "plain", [0.0, 1e-7, 1e-2])], lambda value: f"{value:.0e}", log=True)
    assert [logged.ticks[0][1], logged.ticks[-1][1]] == ["1e-07", "1e-02"]
    assert all(logged.top <= y <= logged.bottom for _, points in logged.curves for _, y in points)


def test_times_read_well() -> None:
    assert [readable_time(each) for each in (0.0012, 0.0123, 0.4312, 4.312, 431.2)] == [
        "1.20 ms",
        "12.3 ms",
        "431 ms",
        "4.31 s",
        "431 s",
    ]
