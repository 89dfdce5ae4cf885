"""The proof itself: it holds for a few families, and it fails where a formula is another."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.proof import __main__
from tests.proof.compare import Degenerate, Differs, Run, agree, meaningful
from tests.proof.runner import OUTCOMES, Verdict, prover

ROOT = Path(__file__).parents[2]

NORM, MLP = "rms_norm of Qwen3RMSNorm.forward", "gated_mlp of Qwen3MLP.forward"
ROTARY, CALL = "rotary of apply_rotary_pos_emb", "rotary of Qwen3Attention.forward"
FUSED = "qk_norm_rotary of Qwen3Attention.forward"
LAYER = "add_rms_norm of Qwen3DecoderLayer.forward"
LOSS = "linear_cross_entropy of Qwen3ForCausalLM.forward"
POSITIONS = "host_metadata of Qwen3Model.forward"
LOOP = "layer_loop of Qwen3Model.forward"
#: What `tests.proof.spoiled` spoils, and the verdicts that then are other than "equal".
SPOILED = {
    "nothing": {},
    "another result": {NORM: "differs"},
    "another dtype": {NORM: "differs"},
    "no gradient": {NORM: "differs"},
    "an error": {NORM: "differs"},
    "no guard is taken": dict.fromkeys((NORM, LAYER, MLP, ROTARY, FUSED, LOSS), "unreached"),
    "a class that cannot be built": {MLP: "unbuildable"},
    "nothing but zeros": dict.fromkeys((NORM, LAYER, FUSED, MLP), "degenerate"),
    "no bound call": dict.fromkeys((CALL, POSITIONS), "unreached"),
}


@pytest.mark.parametrize(
    "op", ["count_check", "absent_modality", "sample_boundaries", "rms_norm", "log_decay"]
)
def test_an_op_has_a_prover_with_a_folder_of_tests_and_without(op):
    assert callable(prover(SimpleNamespace(op=op, counted=True)))


def run(*command, cache):
    environment = {**os.environ, "VEOMNI_CACHE_DIR": str(cache), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_a_family_is_proved(tmp_path):
    # Other ops are proved where nothing is spoiled.
    ops = ("--op", "moe_experts", "--op", "moe_router", "--op", "load_balancing_loss")
    done = run("-m", "tests.proof", "qwen3_moe", "--workers", "1", *ops, cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("routed sites, 0 without proof")
    assert "gradients compared at" in done.stdout


@pytest.mark.slow
def test_whatever_is_spoiled_is_no_proof(tmp_path):
    done = run("-m", "tests.proof.spoiled", cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    spoiled = {
        case: {target: outcome for target, outcome in verdicts.items() if outcome != "equal"}
        for case, verdicts in found.items()
    }
    assert spoiled == SPOILED
    assert set(found["nothing"]) == {NORM, LAYER, MLP, ROTARY, CALL, FUSED, LOSS, LOOP, POSITIONS}


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_every_verdict_but_a_proof_fails(outcome, monkeypatch, capsys):
    verdict = Verdict("module", "A.forward", "rms_norm", "unweighted", outcome, gradients=3)
    proved = Verdict("module", "B.forward", "rotary", "half_split", "equal")
    monkeypatch.setattr(__main__, "modules", lambda families: ["module"])
    monkeypatch.setattr(__main__, "prove", lambda *_, **__: [("module", [verdict, proved])])
    with pytest.raises(SystemExit) as ended:
        __main__.main(None, None, 1, None)
    assert ended.value.code == verdict.failed == (outcome not in ("equal", "rounding"))
    assert f"2 routed sites, {int(verdict.failed)} without proof" in capsys.readouterr().out


def test_nothing_to_prove_is_no_proof(monkeypatch):
    monkeypatch.setattr(__main__, "modules", lambda families: [])
    monkeypatch.setattr(__main__, "prove", lambda *_, **__: [])
    with pytest.raises(SystemExit) as ended:
        __main__.main(None, None, 1, None)
    assert ended.value.code == 1


def test_results_are_compared_within_rounding_only():
    torch = pytest.importorskip("torch")
    one = Run(output=torch.tensor([1.0, 2.0]))
    assert not agree(one, Run(output=torch.tensor([1.0, 2.0])))
    assert agree(one, Run(output=torch.tensor([1.0, 2.0 + 2e-7])))["output"] < 2e-7
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


def test_a_comparison_has_to_say_something():
    torch = pytest.importorskip("torch")
    zeros, ones, nan = torch.zeros(2), torch.ones(2), torch.tensor([1.0, float("nan")])
    meaningful(Run({"output": ones, "grad of x": ones}), ["x"])
    for degenerate in (
        {"output": zeros, "grad of x": ones},
        {"output": ones, "grad of x": zeros},
        {"output": ones, "grad of x": nan},
        {"output": ones * float("inf"), "grad of x": ones},
        {"output": ones},
        {"output": ones.long(), "grad of x": ones},
        {"output": torch.ones(0), "grad of x": ones},
    ):
        with pytest.raises(Degenerate):
            meaningful(Run(degenerate), ["x"])
