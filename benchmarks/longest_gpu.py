"""The longest sequence that a GPU trains: `python -m benchmarks.longest_gpu`.

    python -m benchmarks.longest_gpu                      # 80 GB; about 300 s
    python -m benchmarks.longest_gpu --memory 141         # of a larger GPU
    python -m benchmarks.longest_gpu --plan               # predictions alone
    python -m benchmarks.longest_gpu --optimizer host     # gradients leave the GPU in the backward
    python -m benchmarks.longest_gpu --whole 131072 --optimizer 8bit     # all layers, with their optimizer
    python -m benchmarks.longest_gpu --lengths 32768      # what the parts of the setting cost at a length

Whole models in bfloat16, weights and gradients on the GPU, with ``VEOMNI_MEMORY=checkpoint,offload,tiles``.
The longest sequence is predicted and then trained: with some of the layers, so that it ends in time, and an
allocation in place of the weights and gradients of the others. What layers keep is on the host, so the GPU
needs no more for more of them; what the host needs for all of them is printed. ``--optimizer``: AdamW of
torchao, whose states, gradients and a copy of the weights are on the host, or states of 8 bits on the GPU; by
default none runs. Use PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against fragments.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._families import FAMILIES
from benchmarks._record import RESULTS

TARGET = "longest_gpu-cuda.json"
GIBIBYTE = 2**30
RANK = 16
#: Measured steps of each setting.
TURNS = 5
#: The models by name: class, fields, and what PEFT trains, if not all weights.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "Qwen3-8B": ("qwen3", FAMILIES["Qwen3-8B"].fields | {"num_hidden_layers": 36}, None),
    "Llama-3-8B": ("llama", FAMILIES["Llama-3-8B"].fields | {"num_hidden_layers": 32}, None),
    "Qwen3-30B-A3B, LoRA": (
        "qwen3_moe",
        FAMILIES["Qwen3-30B-A3B"].fields | {"num_hidden_layers": 48},
        {
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
}


def built(name: str, device: str, layers: int | None = None) -> Any:
    """Return a model in training mode; ``layers``: in place of its own number."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, fields, adapters = MODELS[name]
    fields = fields | ({"num_hidden_layers": layers} if layers else {})
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields), dtype=torch.bfloat16)
        if adapters is not None:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, **adapters))
    return model.train()


def batch(model: Any, length: int, device: str) -> dict[str, Any]:
    """Return one sequence of random tokens."""
    import torch

    ids = torch.randint(0, model.config.vocab_size, (1, length), device=device)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def size_of(model: Any, *, gradients: bool = True) -> int:
    """Return the bytes of weights, and of their gradients."""
    return sum(
        p.numel() * p.element_size() * (1 + (gradients and p.requires_grad)) for p in model.parameters()
    )


def optimizer_of(kind: str, model: Any) -> Any:
    """Return torchao's AdamW: ``host``, ``8bit``, or None for ``none``."""
    if kind == "none":
        return None
    import torch
    from torchao.optim import AdamW8bit, CPUOffloadOptimizer

    if kind == "8bit":
        return AdamW8bit(model.parameters(), lr=1e-5)
    return CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=True, lr=1e-5)


def planned(name: str, memory: int, layers: int, device: str, optimizer: str) -> dict[str, Any]:
    """Return the longest sequence whose step takes ``memory`` bytes, and the parts of its peak.

    Args:
        name: of the model.
        memory: bytes.
        layers: so many are predicted; the weights and gradients of the others are added.
        device: where the step would run.
        optimizer: ``host``: gradients are gone when the next layer runs; of all others they stay.
    """
    import torch

    from veomni_hook.memory.lengths import longest
    from veomni_hook.memory.prediction import predict

    model, whole = built(name, "meta", layers), size_of(built(name, "meta"), gradients=optimizer != "host")
    others = whole - size_of(model)
    began, predictions = time.perf_counter(), dict[int, Any]()

    def peak(length: int) -> int:
        predictions[length] = predict(model, batch(model, length, "cpu"), device=torch.device(device))
        return int(predictions[length].peak) + others

    length = longest(peak, 400_000, memory)
    largest = sorted(predictions[length].parts.items(), key=lambda row: -row[1])
    return {
        "model": name,
        "memory": memory,
        "longest": length,
        "predicted": predictions[length].peak + others,
        "parts": {"weights and gradients of other layers": others, **dict(largest)},
        "lengths": {str(at): prediction.peak + others for at, prediction in sorted(predictions.items())},
        "seconds": round(time.perf_counter() - began, 1),
        "weights and gradients": whole,
    }


def trained(
    name: str, length: int, memory: int, optimizer: str, layers: int | None = None, whole: int = 0
) -> dict[str, Any]:
    """Return what two steps take: of all layers, or of some beside an allocation for the others.

    Args:
        name: of the model.
        length: tokens.
        memory: the bytes that the process may take.
        optimizer: see `optimizer_of`.
        layers: how many there are; None: all.
        whole: the bytes of the weights of all layers, and of their gradients if these stay.
    """
    import torch

    from veomni_hook.memory.host import BLOCK, BLOCKS

    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, memory / total))
    model = built(name, "cuda", layers)
    adam = optimizer_of(optimizer, model)
    own = size_of(model, gradients=optimizer != "host")
    ballast = torch.empty(max(0, whole - own), dtype=torch.uint8, device="cuda")
    inputs = batch(model, length, "cuda")
    number = MODELS[name][1]["num_hidden_layers"]
    facts: dict[str, Any] = {"layers": layers or number, "length": length, "optimizer": optimizer}
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        loss = model(**inputs).loss
        loss.backward()
        torch.cuda.synchronize()
        facts["seconds"] = round(time.perf_counter() - began, 2)
        if adam is not None:
            adam.step()
            torch.cuda.synchronize()
            facts["optimizer_seconds"] = round(time.perf_counter() - began - facts["seconds"], 2)
        facts["peak"] = torch.cuda.max_memory_allocated()
        facts["reserved"] = torch.cuda.max_memory_reserved()
        facts.setdefault("losses", []).append(loss.item())
        if facts["seconds"] > 60 and layers is not None:
            break
        model.zero_grad(set_to_none=True)
    # What each layer keeps is the same.
    facts["host"] = BLOCKS.held * BLOCK * number // facts["layers"]
    del ballast
    return facts


def costs(name: str, length: int, layers: int) -> dict[str, Any]:
    """Return the seconds and the peak of a step with each part of the setting; they alternate."""
    import torch

    from veomni_hook.memory import parts
    from veomni_hook.memory.remedies import with_setting

    model = built(name, "cuda", layers)
    inputs = batch(model, length, "cuda")
    seconds: dict[str, list[float]] = {text: [] for text in parts.LADDER}
    peaks: dict[str, int] = {}
    with parts.using(parts.Parts()):
        model.gradient_checkpointing_disable()
        for turn in range(TURNS + 1):
            for text in parts.LADDER:
                block = with_setting(text, model)
                assert block is not None
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                began = time.perf_counter()
                with block:
                    model(**inputs).loss.backward()
                    torch.cuda.synchronize()
                seconds[text] += [time.perf_counter() - began] if turn else []
                peaks[text] = torch.cuda.max_memory_allocated()
                model.zero_grad(set_to_none=True)
    rows = {text: {"ms": 1000 * median(times), "peak": peaks[text]} for text, times in seconds.items()}
    return {"model": name, "layers": layers, "length": length, "settings": rows}


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="beginnings of names")
    parser.add_argument("--memory", type=float, default=80.0, metavar="GB")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--optimizer", choices=("none", "host", "8bit"), default="none")
    parser.add_argument("--whole", type=int, nargs="+", metavar="LENGTH", default=[])
    parser.add_argument("--lengths", type=int, nargs="+", metavar="LENGTH", default=[])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS / TARGET)
    options = parser.parse_args()
    os.environ.setdefault("VEOMNI_MEMORY", "checkpoint,offload=64TiB,tiles")
    import torch

    import veomni_hook.install  # noqa: F401
    from veomni_hook.memory.budget import SHARE
    from veomni_hook.tools.bench.record import circumstances, write

    memory = int(options.memory * 1e9)
    rows: list[dict[str, Any]] = []

    def noted(facts: dict[str, Any], told: str) -> None:
        rows.append(facts)
        print(told, flush=True)
        write(circumstances("longest_gpu", options.device) | {"cases": rows}, options.out)

    def measured(facts: dict[str, Any], length: int, **some: int) -> None:
        try:
            facts |= trained(facts["model"], length, memory, options.optimizer, **some)
            sizes = {part: facts[part] / GIBIBYTE for part in ("peak", "reserved", "host")}
            told = ", ".join(f"{part} {size:.2f}" for part, size in sizes.items())
            step = f"{facts['seconds']} s, and {facts.get('optimizer_seconds', 0)} s of the optimizer"
            noted(facts, f"    {facts['layers']} layers, {length:,} tokens: {step}; GiB: {told}")
        except torch.OutOfMemoryError as error:
            facts["error"] = str(error).splitlines()[0]
            noted(facts, f"    {facts['error']}")
        gc.collect()
        torch.cuda.empty_cache()

    for name in MODELS:
        if not name.startswith(tuple(options.models) or ""):
            continue
        for length in options.lengths:
            facts = costs(name, length, options.layers)
            told = ", ".join(
                f"{text} {row['ms']:.1f} ms {row['peak'] / GIBIBYTE:.2f} GiB"
                for text, row in facts["settings"].items()
            )
            noted(facts, f"{name}, {options.layers} layers, {length:,} tokens: {told}")
        for length in options.whole:
            print(f"{name}, optimizer: {options.optimizer}")
            measured({"model": name, "memory": memory}, length)
        if options.lengths or options.whole:
            continue
        facts = planned(name, int(SHARE * memory), options.layers, options.device, options.optimizer)
        print(
            f"{name}: {facts['longest']:,} tokens in {options.memory:.0f} GB, planned in {facts['seconds']} s"
        )
        parts = ", ".join(f"{part} {size / GIBIBYTE:.2f}" for part, size in [*facts["parts"].items()][:9])
        print(f"    {facts['predicted'] / GIBIBYTE:.2f} GiB: {parts}", flush=True)
        if not options.plan and facts["longest"]:
            measured(facts, facts["longest"], layers=options.layers, whole=facts["weights and gradients"])


if __name__ == "__main__":
    main()
