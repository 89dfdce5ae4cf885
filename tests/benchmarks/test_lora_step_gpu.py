"""`lora_step_gpu`: what its processes measure, on a CPU at a small size, and what is recorded."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("peft")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import _lora_worker, _unsloth_worker, lora_step_gpu
from benchmarks._families import Family, shape
from benchmarks._lora_worker import CASES

SMALL = {
    "qwen3": Family("qwen3", shape(64, 96, 2, "4 2 16", 131), length=24),
    "qwen3_moe": Family(
        "qwen3_moe",
        shape(64, 96, 2, "4 2 16", 131)
        | {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
        length=24,
    ),
}
#: float32 adapters of a bfloat16 model are left to PEFT on a CPU.
SMALL_CASES = {
    name: case._replace(family=SMALL[case.family.model_type])
    for name, case in CASES.items()
    if name in ("Qwen3-8B, adapters in bfloat16", "Qwen3-30B-A3B, adapters in float32")
}


def test_the_cases_are_those_of_the_documents():
    assert len(CASES) == 4
    assert [case.float32 for case in CASES.values()] == [False, True, False, True]
    assert {case.family.length * case.family.batch for case in CASES.values()} == {8192}
    assert list(lora_step_gpu.chosen(["Qwen3-30B"])) == list(CASES)[2:]
    assert lora_step_gpu.chosen([]) == CASES
    compiled = ["compile" in lora_step_gpu.sides_of(case) for case in CASES.values()]
    assert compiled == [False, True, False, True]
    with pytest.raises(SystemExit, match="no case begins with nothing; known: Qwen3-8B"):
        lora_step_gpu.chosen(["nothing"])


def test_unsloth_takes_part_where_it_can_be_imported(monkeypatch):
    for spec in (None, object()):
        monkeypatch.setattr(importlib.util, "find_spec", {"unsloth": spec}.get)
        for case in CASES.values():
            assert ("unsloth" in lora_step_gpu.sides_of(case)) == (spec is not None)


def test_the_tokenizer_of_unsloths_checkpoint_loads(tmp_path):
    from transformers import AutoTokenizer

    _unsloth_worker._save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)


@pytest.mark.slow
def test_sides_train_the_same_adapters(monkeypatch, tmp_path):
    monkeypatch.setattr(lora_step_gpu, "ROUNDS", 1)
    monkeypatch.setattr(lora_step_gpu, "STEPS", 2)
    out = tmp_path / "results.json"
    lora_step_gpu.measured(SMALL_CASES, ["eager", "ours"], "cpu", out)
    written = json.loads(out.read_text())
    assert written["rank"] == 16 and str(tmp_path) not in out.read_text()
    assert [row["case"] for row in written["cases"]] == list(SMALL_CASES)
    for row, number in zip(written["cases"], (28, 24), strict=True):
        sides = row["sides"]
        assert not any("error" in one for one in sides.values()), sides
        assert row["date"] and sides["eager"]["peft"]
        assert sides["ours"]["adapters"] == sides["eager"]["adapters"] == number
        assert 0 < sides["ours"]["norms_off"]["most"] < 0.2
        assert 0 < sides["eager"]["range_ms"][0] <= sides["eager"]["step_ms"]
    dense, experts = (row["sides"]["ours"]["explain"] for row in written["cases"])
    assert any("low_rank_linear/product_added: torch" in told for told in dense)
    assert any("adapter fused (down_proj, gate_up_proj)" in told for told in experts)


def run_with(**facts):
    run = lora_step_gpu.Run(next(iter(CASES.values())), [], "cpu")
    run.facts = facts
    return run


def fact(loss=2.0, norm=1.0, **norms):
    return {"loss": loss, "gradient_norm": norm, "norms": norms or {"a": 1.0, "b": 0.5}}


@pytest.mark.parametrize(
    ("other", "error"),
    [
        (fact(2.001, 1.01), None),
        (fact(loss=2.1), "the loss is off by 5.0e-02"),
        (fact(loss=float("nan")), "the loss is off by nan"),
        (fact(norm=1.1), "the norm of all gradients is off by 1.0e-01"),
        (fact(a=1.2, b=0.6), "the median of the gradients' norms is off by 2.0e-01"),
        (fact(a=1.0), "ours has 1 gradients, eager 2"),
    ],
)
def test_a_side_that_computes_something_else_is_not_timed(other, error):
    run = run_with(eager=fact(), ours={**other})
    run.compare()
    assert "error" not in run.facts["eager"]
    assert run.facts["ours"].get("error", "").startswith(error) if error else "error" not in run.facts["ours"]


def test_a_side_that_cannot_run_says_why():
    run = run_with(eager=fact(), compile={"error": "out of memory"})
    run.compare()
    assert run.facts["compile"] == {"error": "out of memory"}
    assert "out of memory" in lora_step_gpu.line("case", {"compile": run.facts["compile"]})


def test_cases_survive_the_way_to_a_worker():
    case = next(iter(CASES.values()))
    sent = json.loads(json.dumps(list(case)))
    again = _lora_worker.Case(*sent)
    assert again._replace(family=Family(*again.family)) == case
