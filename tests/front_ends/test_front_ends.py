"""Front ends train through their own command, unchanged, without the hook and with it: `nox -s front_ends`."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file

from tests.front_ends.cases import CASES, EVALUATIONS, STEPS
from tests.recipes import tiny
from tests.recipes.running import ROOT, environment, run, said_of
from veomni_hook.tools.compare.plan import Plan

pytestmark = pytest.mark.slow

#: The front end that `nox -s front_ends` has installed.
CHOSEN = os.environ.get("FRONT_END")
OBSERVER = Path(__file__).parent / "observer"
#: Beside float32's own rounding, five steps of an optimizer add up.
CLOSE = 1e-5
BANNER = r"veomni-hook: \S+ patched at \d+ places \(torch: \d+[^)]*\); details: veomni.hook.explain"


class Trained(NamedTuple):
    """What a run left: what it printed, what each rank recorded, and the weights that it saved."""

    printed: str
    ranks: list[dict[str, Any]]
    saved: dict[str, Any]


def start(case, folder, *, hook):
    """Run the command of a case in a folder of its own; return what it printed."""
    switch = ["veomni-hook", "run"] if hook and not case.plugin else []
    variables = {"VEOMNI_KERNELS": "torch"} if hook else {}
    (folder / "record").mkdir(parents=True)
    model = str(getattr(tiny, case.model)(folder / "model"))
    (folder / "rows.json").write_text(json.dumps(case.rows), encoding="utf-8")
    (folder / "plugin.py").write_text("import veomni_hook.install\n" if hook else "", encoding="utf-8")
    (folder / "dataset_info.json").write_text('{"rows": {"file_name": "rows.json"}}', encoding="utf-8")
    config = json.dumps(case.config).replace("{model}", model)
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    scripts = Path(sys.executable).parent
    return run(
        ["bash", "-c", 'exec "$@" 2>&1', "bash", *switch, *case.command.replace("{model}", model).split()],
        folder,
        900,
        {
            **environment(folder, **case.variables, **variables),
            **Plan(str(folder / "record"), STEPS, 0.0).variables(),
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{OBSERVER}{os.pathsep}{ROOT}",
        },
    )


def train(case, folder, *, hook):
    """Run the command of a case and read what it left."""
    printed = start(case, folder, hook=hook)
    record = folder / "record"
    ranks = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(record.glob("result-*.json"))]
    saved = {}
    for path in sorted((folder / "out").glob("**/*.safetensors")):
        saved.update({f"{path.relative_to(folder)} {name}": value for name, value in load_file(path).items()})
    return Trained(printed, ranks, saved)


def skip_what_is_not_here(case):
    if CHOSEN is None:
        pytest.skip(
            f"""needs {case.front_end}; `nox -s "front_ends(front_end='{case.front_end}')"` installs it"""
        )
    if case.not_here:
        pytest.skip(case.not_here)


def chosen(cases):
    return [name for name, case in cases.items() if CHOSEN in (None, case.front_end)]


def assert_ops_ran(case, explanation, mode):
    if case.note:
        assert re.search(case.note, explanation, re.MULTILINE)
        assert "own head calls our kernel." in explanation
    said = said_of(explanation)
    assert set(said) == case.ops
    for op, lines in said.items():
        expected = case.eager.get(op, r"torch \(.*, \d+ calls in (training|evaluation)")
        assert [line for line in lines if not re.match(expected, line)] == []
        assert op in case.eager or any(f"calls in {mode}" in line for line in lines)


@pytest.mark.parametrize("name", chosen(CASES))
def test_a_front_end_trains_as_without_the_hook_and_on_kernels(name, tmp_path):
    case = CASES[name]
    skip_what_is_not_here(case)
    without = train(case, tmp_path / "without", hook=False)
    hooked = train(case, tmp_path / "hooked", hook=True)

    assert len(without.ranks) == len(hooked.ranks) == case.ranks
    for expected, got in zip(without.ranks, hooked.ranks, strict=True):
        # The policy that drew its own samples has a loss of 0, and a gradient.
        assert len(expected["losses"]) == len(set(expected["gradients"])) == STEPS
        for numbers in ("losses", "gradients"):
            assert got[numbers] == pytest.approx(expected[numbers], rel=CLOSE, abs=CLOSE / 5)
    assert without.saved.keys() == hooked.saved.keys() != set()
    for key, weight in without.saved.items():
        # Adam divides by the size of a gradient, also where the gradient is mere rounding.
        assert (hooked.saved[key] - weight).abs().max() <= 1e-4, key

    assert "no kernel slots" in without.ranks[0]["explanation"]
    assert_ops_ran(case, hooked.ranks[0]["explanation"], "training")
    others = set(without.printed.splitlines())  # verl also speaks of VeOmni
    of_hook = [
        line for line in hooked.printed.splitlines() if "veomni" in line.lower() and line not in others
    ]
    assert any(re.search(BANNER, line) for line in of_hook)
    # A kernel that is chosen by name and does not run is a warning. ms-swift imports transformers before its plugins.
    expected = rf"{BANNER}|\b({'|'.join(case.eager) or '-'})/\w+: upstream's code runs instead of torch: "
    expected += "|AlreadyImportedWarning: transformers imported too early\\." if case.plugin else ""
    assert [line for line in of_hook if not re.search(expected, line)] == []


@pytest.mark.parametrize("name", chosen(EVALUATIONS))
def test_an_evaluation_measures_what_it_measures_without_the_hook(name, tmp_path):
    case = EVALUATIONS[name]
    skip_what_is_not_here(case)
    start(case, tmp_path / "without", hook=False)
    printed = start(case, tmp_path / "hooked", hook=True)

    without, hooked = (measured(tmp_path / folder / "out") for folder in ("without", "hooked"))
    assert len(without) == len(case.rows)
    assert hooked == pytest.approx(without, rel=CLOSE)
    assert re.search(BANNER, printed)
    assert_ops_ran(case, printed, "evaluation")


def measured(folder):
    """The log-likelihoods of all samples that lm-eval has logged in a folder."""
    (samples,) = folder.glob("**/samples_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    return [float(row["resps"][0][0]) for row in sorted(rows, key=lambda row: row["doc_id"])]
