"""The proof itself: it holds for a few families, and it fails where a formula is another."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.proof.compare import Differs, Run, agree
from tests.proof.mutants import mutants

ROOT = Path(__file__).parents[2]

WRONG = """
from tests.proof import runner
runner._start()
from veomni_hook.kernels.rms_norm import reference
right = reference.cast_before_weight
reference.cast_before_weight = lambda x, weight, eps: right(x, weight, eps) * 1.001
for verdict in runner.prove_module("transformers.models.qwen3.modeling_qwen3"):
    print(verdict.op, verdict.outcome)
"""


def run(*command: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "VEOMNI_CACHE_DIR": str(cache), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


def test_a_few_families_are_proved(tmp_path):
    done = run("-m", "tests.proof", "qwen3_moe", "--workers", "1", cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("routed sites, 0 without proof")


def test_another_formula_is_no_proof(tmp_path):
    done = run("-c", WRONG, cache=tmp_path)
    outcomes = dict(line.split() for line in done.stdout.splitlines())
    assert outcomes["rms_norm"] == "differs", done.stdout + done.stderr
    assert outcomes["gated_mlp"] == "equal"


def test_results_are_compared_within_rounding_only():
    torch = pytest.importorskip("torch")
    one = Run(output=torch.tensor([1.0, 2.0]))
    assert agree(one, Run(output=torch.tensor([1.0, 2.0])))
    assert not agree(one, Run(output=torch.tensor([1.0, 2.0 + 2e-7])))
    for other in (
        Run(output=torch.tensor([1.0, 2.001])),
        Run(output=torch.tensor([1.0, float("nan")])),
        Run(output=torch.tensor([1.0, 2.0], dtype=torch.float64)),
        Run(),
    ):
        with pytest.raises(Differs):
            agree(one, other)
    with pytest.raises(Differs, match="nothing"):
        agree(Run(), Run())


def test_every_mutant_is_another_program():
    tree = ast.parse("def f(x, y):\n    z = x.float() * 2\n    return (z - y).mean(-1, keepdim=True)\n")
    found = {ast.dump(mutant) for _, mutant in mutants(tree, ["f"], 60, seed=0)}
    assert len(found) > 10
    assert ast.dump(tree) not in found
