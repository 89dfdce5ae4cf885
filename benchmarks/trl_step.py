"""TRL's fused head in the shapes of GRPO and DPO on a CPU, alone and with our log-probabilities.

    python -m benchmarks.trl_step      # vocabulary 151,936, hidden size 64, 2 x (192 + 64) tokens; 3 GiB

A Qwen3 of one layer with TRL's ``add_fused_lm_head``, called as `GRPOTrainer` and `DPOTrainer` call it (only
completions have labels), and the backward pass of the log-probabilities, for GRPO of the entropies, too.
Each side runs in an interpreter of its own. Time is the shortest of three steps after the first; memory is
the peak of the process during them less what it held before. Needs TRL (``constraints-recipes.txt``). Exits
with an error if the sides compute different numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CONFIG = "veomni_hook.patches.trainers.trl"
SIDES: dict[str, dict[str, str]] = {
    "TRL": {"VEOMNI_HOOK": "0"},
    "TRL with the hook": {},
    "with our log-probabilities": {"VEOMNI_PATCHES": CONFIG},
}
OUTPUTS = {"grpo": ("log_probs", "entropy"), "dpo": ("log_probs", "entropy", "mean_logits", "is_top1")}
SIZES = {"vocabulary": 151_936, "hidden": 64, "batch": 2, "prompt": 192, "completion": 64}


def memory(field: str) -> float:
    """Return a field of ``/proc/self/status`` that is in kB, in GiB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 2**20


def measure(kind: str, sizes: argparse.Namespace) -> dict[str, Any]:
    """Return the shortest time of a step, its peak of memory, and numbers to compare."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=sizes.vocabulary, hidden_size=sizes.hidden, intermediate_size=2 * sizes.hidden,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).train()
    add_fused_lm_head(model, temperature=0.9, outputs=OUTPUTS[kind])
    tokens = torch.randint(0, sizes.vocabulary, (sizes.batch, sizes.prompt + sizes.completion))
    labels = tokens.clone()
    labels[:, : sizes.prompt] = -100
    times, peaks, said = [], [], []
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the peak
        held, start = memory("VmRSS"), time.perf_counter()
        output = model(input_ids=tokens, labels=labels, fused_lm_head=True)
        loss = output.loss - (0.01 * output.entropy.mean() if kind == "grpo" else 0)
        loss.backward()
        times.append(time.perf_counter() - start)
        peaks.append(memory("VmHWM") - held)
        norm = torch.nn.utils.get_total_norm([each.grad for each in model.parameters()])
        said = [
            loss.item(),
            norm.item(),
            *(getattr(output, name).float().sum().item() for name in OUTPUTS[kind]),
        ]
    return {"seconds": min(times[1:]), "peak": max(peaks[1:]), "numbers": said}


def worker(kind: str, side: dict[str, str]) -> dict[str, Any]:
    """Measure one side in a process of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VEOMNI_")}
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.trl_step", *sys.argv[1:], "--worker", kind],
        env={**kept, **side},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    answer: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return answer


def main() -> None:
    """Measure and print every side of both shapes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    sizes = parser.parse_args()
    if sizes.worker:
        import veomni_hook.install  # noqa: F401 - before trl and transformers

        print(json.dumps(measure(sizes.worker, sizes)))
        return
    for kind in OUTPUTS:
        found = {name: worker(kind, side) for name, side in SIDES.items()}
        expected = found["TRL"]["numbers"]
        for name, one in found.items():
            print(f"{kind}  {name:28}{one['seconds']:6.2f} s {one['peak']:6.2f} GiB", flush=True)
            for number, other in zip(one["numbers"], expected, strict=True):
                if abs(number - other) > 1e-4 * max(1, abs(other)):
                    raise SystemExit(f"{name}: {one['numbers']} differ from {expected}")


if __name__ == "__main__":
    main()
