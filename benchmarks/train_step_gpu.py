"""Training steps of a Qwen3 on a CUDA device, with and without the hook.

`python -m benchmarks.train_step_gpu` runs each mode in an interpreter of its own: 8 layers of Qwen3-0.6B's
widths, vocabulary 151,936, 4 x 2,048 tokens, bfloat16, AdamW. Times are medians of the steps after the third.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version

from benchmarks._record import RESULTS

MODES = {"without the hook": None, "auto": "auto", "linear_cross_entropy=torch": "linear_cross_entropy=torch"}
STEPS = 20


def main() -> None:
    """Run every mode in an interpreter of its own and record the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    mode = parser.parse_args().worker
    if mode is not None:
        print(json.dumps(train(MODES[mode])))
        return
    results = {}
    for name in MODES:
        command = [sys.executable, "-m", "benchmarks.train_step_gpu", "--worker", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results[name] = json.loads(done.stdout.splitlines()[-1])
        found = results[name]
        print(
            f"{name:30}{found['step_ms']:8.1f} ms a step{found['peak_gib']:8.1f} GiB",
            f"last loss {found['losses'][-1]:.4f}",
        )
    record = {
        "benchmark": "train_step_gpu",
        "device": results["auto"]["device"],
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python -m benchmarks.train_step_gpu",
        "modes": results,
    }
    RESULTS.mkdir(exist_ok=True)
    target = RESULTS / "train_step_gpu.json"
    target.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"written: {target.relative_to(RESULTS.parent.parent)}")


def train(kernels: str | None) -> dict[str, object]:
    """Train in this process; `kernels` None means without the hook."""
    if kernels is not None:
        from veomni_hook import activate

        activate(kernels=kernels)
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
    )
    model = Qwen3ForCausalLM(config).to("cuda", torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, config.vocab_size, (4, 2048), generator=torch.Generator().manual_seed(1)).cuda()
    times, losses = [], []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
        losses.append(loss.item())
    return {
        "step_ms": statistics.median(times[3:]) * 1e3,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "losses": losses,
        "device": torch.cuda.get_device_name(),
    }


if __name__ == "__main__":
    main()
