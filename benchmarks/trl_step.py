"""TRL's fused head in the shapes of GRPO, DPO and SFT, alone and with our log-probabilities.

    python -m benchmarks.trl_step                  # a CPU: hidden size 64, 2 x (192 + 64) tokens; 3 GiB
    python -m benchmarks.trl_step --device cuda    # an H200: hidden size 4,096, 16 x (256 + 768) tokens

A Qwen3 of one layer with TRL's ``add_fused_lm_head``, called as `GRPOTrainer` and `DPOTrainer` call it (only
completions have labels), and the backward pass of the log-probabilities, for GRPO of the entropies, too. On
a CPU it has float32, on a GPU bfloat16, and its result is recorded. Each side runs in an interpreter of its
own. Time is the shortest of the steps after the first; memory is the peak of the process, or of the GPU,
during them less what was held before. Needs TRL (``constraints-recipes.txt``). Exits with an error if the
sides compute different numbers.
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

from benchmarks._record import RESULTS

SIDES: dict[str, dict[str, str]] = {
    "TRL": {"VEOMNI_HOOK": "0"},
    "TRL with the hook": {},
    "and TRL's own head": {"VEOMNI_KERNELS": "linear_cross_entropy=eager"},
}
OUTPUTS = {
    "grpo": ("log_probs", "entropy"),
    "dpo": ("log_probs", "entropy", "mean_logits", "is_top1"),
    "sft": ("log_probs", "entropy", "is_top1"),
}
SIZES = {
    "cpu": {"vocabulary": 151_936, "hidden": 64, "batch": 2, "prompt": 192, "completion": 64},
    "cuda": {"vocabulary": 151_936, "hidden": 4096, "batch": 16, "prompt": 256, "completion": 768},
}
STEPS = {"cpu": 4, "cuda": 8}
#: How far sums may be apart, in shares of the sums of absolute values: a GPU has bfloat16 operands.
APART = {"cpu": 1e-4, "cuda": 2e-3}


class Peak:
    """The peak of memory above what was held when it was begun, in GiB."""

    def __init__(self, device: str) -> None:
        self.device = device
        if device == "cpu":
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the peak
            self.held = memory("VmRSS")
        else:
            import torch

            torch.cuda.reset_peak_memory_stats()
            self.held = torch.cuda.memory_allocated() / 2**30

    def read(self) -> float:
        """Return it."""
        if self.device == "cpu":
            return memory("VmHWM") - self.held
        import torch

        return torch.cuda.max_memory_allocated() / 2**30 - self.held


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
    torch.set_default_dtype(torch.float32 if sizes.device == "cpu" else torch.bfloat16)
    heads = max(4, sizes.hidden // 128)
    config = Qwen3Config(
        vocab_size=sizes.vocabulary, hidden_size=sizes.hidden, intermediate_size=2 * sizes.hidden,
        num_hidden_layers=1, num_attention_heads=heads, num_key_value_heads=heads // 2, head_dim=64,
    )  # fmt: skip
    with torch.device(sizes.device):
        model = Qwen3ForCausalLM(config).train()
    add_fused_lm_head(model, temperature=0.9, outputs=OUTPUTS[kind])
    tokens = torch.randint(0, sizes.vocabulary, (sizes.batch, sizes.prompt + sizes.completion))
    tokens = tokens.to(sizes.device)
    labels = tokens.clone()
    labels[:, : sizes.prompt] = -100
    times, peaks, said = [], [], []
    for _ in range(STEPS[sizes.device]):
        model.zero_grad(set_to_none=True)
        peak, start = Peak(sizes.device), time.perf_counter()
        output = model(input_ids=tokens, labels=labels, fused_lm_head=True)
        loss = output.loss - (0.01 * output.entropy.mean() if kind == "grpo" else 0)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([each.grad for each in model.parameters()])
        said = [(each.item(), abs(each.item())) for each in (loss, norm)]  # waits for the device
        times.append(time.perf_counter() - start)
        peaks.append(peak.read())
        outputs = [getattr(output, name).detach().float() for name in OUTPUTS[kind]]
        said += [(each.sum().item(), each.abs().sum().item()) for each in outputs]
    return {"seconds": min(times[1:]), "peak_gib": max(peaks[1:]), "numbers": said}


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
    parser.add_argument("--device", default="cpu", choices=tuple(SIZES))
    for name in SIZES["cpu"]:
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=tuple(OUTPUTS), help="one of the shapes")
    parser.add_argument("--out", type=Path, default=RESULTS / "trl_step-cuda.json")
    sizes = parser.parse_args()
    for name, size in SIZES[sizes.device].items():
        setattr(sizes, name, getattr(sizes, name) or size)
    if sizes.worker:
        import veomni_hook.install  # noqa: F401 - before trl and transformers

        print(json.dumps(measure(sizes.worker, sizes)))
        return
    facts = {}
    for kind in (sizes.only,) if sizes.only else OUTPUTS:
        facts[kind] = {name: worker(kind, side) for name, side in SIDES.items()}
        expected = facts[kind]["TRL"]["numbers"]
        for name, one in facts[kind].items():
            print(f"{kind}  {name:28}{one['seconds']:7.3f} s {one['peak_gib']:6.2f} GiB", flush=True)
            for (number, _), (other, scale) in zip(one["numbers"], expected, strict=True):
                if not abs(number - other) <= APART[sizes.device] * max(1, scale):  # NaN as well
                    raise SystemExit(f"{name}: {one['numbers']} differ from {expected}")
    if sizes.device != "cpu":
        from veomni_hook.tools.bench.record import circumstances, write

        shape = {name: getattr(sizes, name) for name in SIZES[sizes.device]}
        write(circumstances("trl_step", sizes.device) | shape | {"cases": facts}, sizes.out)


if __name__ == "__main__":
    main()
