"""Predicted and measured peaks of training steps: `python -m benchmarks.memory_prediction_gpu`.

    python -m benchmarks.memory_prediction_gpu            # all set-ups; at most 150 s and 60 GiB
    python -m benchmarks.memory_prediction_gpu Llama      # those whose names begin so

Models with the shapes of real ones and few layers, in bfloat16, with the hook. For each: the prediction
(`veomni_hook.memory.prediction`), then two real steps, of which the second is measured by
`torch.cuda.max_memory_allocated`. Each line is printed, and the file written, as soon as it is known.
"""

from __future__ import annotations

import argparse
import gc
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._families import FAMILIES, shape
from benchmarks._record import RESULTS

TARGET = "memory_prediction_gpu-cuda.json"
RANK = 16
GIBIBYTE = 2**30


class Setup(NamedTuple):
    """One training step.

    Attributes:
        name: of the model, in `MODELS`.
        length: the tokens of a sequence.
        batch: sequences.
        optimizer: the keyword arguments of AdamW; None: the step ends with the gradients.
        checkpoint: whether layers are checkpointed.
        adapters: what PEFT calls ``target_modules`` and ``target_parameters``; None: all weights are trained.
    """

    name: str
    length: int
    batch: int = 1
    optimizer: dict[str, Any] | None = None
    checkpoint: bool = False
    adapters: dict[str, Any] | None = None

    def __str__(self) -> str:
        words = [f"{self.name}, {self.batch} x {self.length:,}"]
        words += ["LoRA"] if self.adapters else []
        words += ["checkpoints"] if self.checkpoint else []
        if self.optimizer is not None:
            words.append(" ".join(["AdamW", *self.optimizer]))
        return ", ".join(words)


MODELS = {
    "Qwen3-8B": ("qwen3", FAMILIES["Qwen3-8B"].fields | {"num_hidden_layers": 4}),
    "Llama-3-8B": ("llama", FAMILIES["Llama-3-8B"].fields | {"num_hidden_layers": 4}),
    "Qwen3-30B-A3B": ("qwen3_moe", FAMILIES["Qwen3-30B-A3B"].fields | {"num_hidden_layers": 2}),
    "small": ("qwen3", shape(64, 192, 2, "4 2 16", 1024)),
}
_LINEAR = {"target_modules": "all-linear"}
_EXPERTS = {
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
SETUPS = (
    Setup("Qwen3-8B", 4096, optimizer={}),
    Setup("Qwen3-8B", 32_768, optimizer={}, checkpoint=True),
    Setup("Qwen3-8B", 8192),
    Setup("Qwen3-8B", 8192, adapters=_LINEAR, optimizer={}),
    Setup("Qwen3-8B", 32_768, adapters=_LINEAR, checkpoint=True),
    Setup("Llama-3-8B", 4096, 2, optimizer={"fused": True}),
    Setup("Llama-3-8B", 32_768, checkpoint=True),
    Setup("Qwen3-30B-A3B", 4096, optimizer={}),
    Setup("Qwen3-30B-A3B", 16_384, checkpoint=True),
    Setup("Qwen3-30B-A3B", 8192, 2),
    Setup("Qwen3-30B-A3B", 8192, adapters=_EXPERTS, optimizer={}),
)


def built(setup: Setup, device: str) -> Any:
    """Return the model of a set-up, in training mode."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, fields = MODELS[setup.name]
    config = AutoConfig.for_model(kind, **fields)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if setup.adapters is not None:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, **setup.adapters))
    if setup.checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return model.train()


def measured(setup: Setup, device: str) -> dict[str, Any]:
    """Return a set-up's prediction and its measured peak, in bytes."""
    import torch

    from veomni_hook.memory.prediction import predict

    model = built(setup, device)
    ids = torch.randint(0, model.config.vocab_size, (setup.batch, setup.length), device=device)
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = None if setup.optimizer is None else torch.optim.AdamW(trained, **setup.optimizer)
    began = time.perf_counter()
    found = predict(model, inputs, optimizer=optimizer)
    seconds = time.perf_counter() - began
    facts = {"setup": str(setup), "seconds": round(seconds, 2), "predicted": found.peak, "parts": found.parts}
    for _ in range(2):
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        model(**inputs).loss.backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad(set_to_none=True)
    if device == "cuda":
        torch.cuda.synchronize()
        facts["measured"] = torch.cuda.max_memory_allocated()
        facts["ratio"] = round(found.peak / facts["measured"], 4)
    return facts


def line(facts: dict[str, Any]) -> str:
    """Return what is printed about a set-up."""
    if "error" in facts:
        return f"{facts['setup']}: {facts['error']}"
    real = facts.get("measured")
    shown = "not measured" if real is None else f"{real / GIBIBYTE:7.2f} GiB, ratio {facts['ratio']:.3f}"
    parts = sorted(facts["parts"].items(), key=lambda row: -row[1])
    told = ", ".join(f"{name} {size / GIBIBYTE:.2f}" for name, size in parts[:8])
    predicted = f"{facts['predicted'] / GIBIBYTE:7.2f} GiB in {facts['seconds']:5.1f} s"
    return f"{facts['setup']:60} predicted {predicted}, measured {shown}\n    {told}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("setups", nargs="*", help="beginnings of names")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS / TARGET)
    options = parser.parse_args(arguments)
    chosen = [one for one in SETUPS if str(one).startswith(tuple(options.setups) or "")]
    from veomni_hook import activate

    activate()
    import torch

    from veomni_hook.tools.bench.record import circumstances, write

    began, rows = time.perf_counter(), []
    for setup in chosen:
        try:
            rows.append(measured(setup, options.device))
        except Exception as error:  # reported; the other set-ups go on
            traceback.print_exc(limit=-8)
            rows.append({"setup": str(setup), "error": f"{type(error).__name__}: {error}"[:500]})
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
        print(line(rows[-1]), f"    until {time.perf_counter() - began:.0f} s", sep="\n", flush=True)
        write(circumstances("memory_prediction_gpu", options.device, setups=rows), options.out)
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    if ratios:
        print(f"{len(ratios)} set-ups, predicted / measured: {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
