"""The longest sequence that LoRA trains on this GPU, ours beside Unsloth's.

    python -m benchmarks.longest_lora_gpu Qwen3-30B       # about 600 s on an H200

The cases and the sides' processes are those of `memory_gpu`: ours with ``checkpoint,offload,tiles``,
Unsloth's with its checkpointing. Two layers train, so that steps end in time, beside an allocation as large
as the weights of the others, their adapters, and the gradients of these; what layers keep is on the host on
both sides. No optimizer runs. The peak grows with the length by a line: two short steps say which length is
the longest, and a shorter and a longer one are run. Use PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks._lora_worker import CASES, Case
from benchmarks._record import RESULTS
from benchmarks.families_gpu import Process
from benchmarks.memory_gpu import SIDES

TARGET = "longest_lora_gpu-cuda.json"
OURS, UNSLOTH = "ours, checkpoint,offload,tiles", "unsloth, checkpointed"
#: All layers of a model; those that train.
LAYERS = {"Qwen3-8B": 36, "Qwen3-30B-A3B": 48}
LEAST = 2
#: Steps of both sides; and what is run of the longest length by the line through their peaks.
SHORT, TRIED = (65_536, 131_072), (0.95, 1.05)
#: Tokens that the config names, for which Unsloth makes tables of its rotary embedding.
MOST = 2**20


def with_layers(case: Case, number: int) -> Case:
    """Return the case with so many layers, and short first steps."""
    fields = case.family.fields | {"num_hidden_layers": number, "max_position_embeddings": MOST}
    return case._replace(family=case.family._replace(fields=fields, batch=1, length=4096))


def size_of(case: Case) -> int:
    """Return the bytes of weights and adapters, and of the gradients of these."""
    import peft
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(case.family.model_type, **case.family.fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        lora = peft.LoraConfig(r=16, target_modules=case.modules, target_parameters=case.parameters)
        model = peft.get_peft_model(model, lora)
    return sum(p.numel() * p.element_size() * (1 + p.requires_grad) for p in model.parameters())


def tried(case: Case, side: str, beside: int, capacity: int, most: float) -> list[dict[str, Any]]:
    """Return what steps of several lengths took; the last is full, or so long that it would take too long."""
    (kernels, worker), variables = SIDES[side]
    process = Process(kernels, "cuda", worker, variables)
    built = process.ask("build", family=list(with_layers(case, LEAST)), side=side)
    rows = [built | {"side": side}] if "error" in built else []

    def run(length: int) -> dict[str, Any]:
        rows.append({"side": side} | process.ask("fits", length=length, beside=beside))
        print(f"    {rows[-1]}", flush=True)
        return rows[-1]

    if not rows:
        one, two = (run(length) for length in SHORT)
        slope = (two["peak"] - one["peak"]) / (two["length"] - one["length"])
        longest = two["length"] + (capacity - two["peak"]) / slope
        for share in TRIED:
            length = int(share * longest) // 1024 * 1024
            if two["seconds"] * (length / two["length"]) ** 2 > most or "peak" not in run(length):
                break
    process.end()
    return rows


def main() -> None:
    """Measure and record."""
    import torch

    from veomni_hook.tools.bench.record import circumstances, write

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help="beginnings of names")
    parser.add_argument("--seconds", type=float, default=200.0, help="a longer step is not run")
    parser.add_argument("--out", type=Path, default=RESULTS / TARGET)
    options = parser.parse_args()
    capacity = torch.cuda.get_device_properties(0).total_memory
    rows: list[dict[str, Any]] = []
    for name, case in CASES.items():
        if not case.float32 or not name.startswith(tuple(options.cases) or ""):
            continue
        number = next(layers for model, layers in LAYERS.items() if name.startswith(model))
        beside = size_of(with_layers(case, number)) - size_of(with_layers(case, LEAST))
        print(f"{name}: {LEAST} of {number} layers beside {beside / 2**30:.2f} GiB", flush=True)
        for side in (OURS, UNSLOTH):
            steps = tried(case, side, beside, int(0.96 * capacity), options.seconds)
            rows.append({"case": name, "side": side, "beside": beside, "steps": steps})
            write(circumstances("longest_lora_gpu", "cuda") | {"cases": rows}, options.out)


if __name__ == "__main__":
    main()
