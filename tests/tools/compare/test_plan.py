"""`veomni-hook plan`: a script's first step is predicted and not run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import environment

SCRIPT = """
import sys, torch
from transformers import Qwen3Config, Qwen3ForCausalLM

class Descent(torch.optim.SGD):
    pass

config = Qwen3Config(
    vocab_size=512, hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, head_dim=16,
)
model = Qwen3ForCausalLM(config).train()
other = torch.optim.SGD(torch.nn.Linear(2, 2).parameters())
optimizer = Descent(model.parameters(), lr=0.1, momentum=0.9)
ids = torch.zeros(3, 64, dtype=torch.long)
if "--calls" in sys.argv:
    model(ids, labels=ids)
    open("ran", "w").write("")
"""


def plan(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, "-m", "veomni_hook", "plan", *arguments], cwd=folder,
        env=environment(folder / "cache"), capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


@pytest.mark.slow
def test_the_first_call_is_predicted_with_the_scripts_optimizer_and_not_run(tmp_path: Path) -> None:
    wanted = ("--memory", "8MiB", "--length", "512", "--json", "-o", "page.html")
    done = plan(tmp_path, *wanted, "train.py", "--calls")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    parts = dict(found["parts"])
    assert (found["subject"], found["shape"], found["optimizer"]) == ("Qwen3ForCausalLM", [3, 64], "Descent")
    assert parts["optimizer"] == parts["weights"]  # the momentum
    assert sum(parts.values()) == found["peak"]
    assert found["longest"] >= 64 and found["reached"][0][0] == "as it is"
    assert not (tmp_path / "ran").exists()
    assert "gradient_checkpointing" in (tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_a_script_that_calls_no_model_is_an_error(tmp_path: Path) -> None:
    done = plan(tmp_path, "train.py")
    assert done.returncode == 2
    assert "before a model was called" in done.stderr
