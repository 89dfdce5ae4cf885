"""The demo's measurements in a separate process: import times, and two models alternately.

`python -m veomni_hook.cli.demo.probe OUTPUT CACHE_DIR ROUNDS PART...` imports transformers, prints `ready`,
waits for a line on its standard input, measures, and writes one JSON object to OUTPUT. The cache folder must
be empty. Each model is built twice, from the installed and from the patched module; both stay loaded. Because
they run alternately in one process, allocator, threads and machine load are the same for both.
"""

from __future__ import annotations

import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from veomni_hook import accelerator

MODULE = "transformers.models.qwen3.modeling_qwen3"
ROUNDS = 5
# Relative, for loss and gradient norm. Float32 on a CPU agrees to about 1e-6; bfloat16 has 8 bits.
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}


class Case(NamedTuple):
    """A model that is trained for a few steps without and with the hook.

    Attributes:
        module: its modeling module.
        name: the family, as in its class names.
        config: the configuration shared by both sizes.
        cpu: tokens per step on a CPU, and the additional configuration there.
        accelerator: the same on an accelerator, where the dtype is bfloat16.
        cpu_dtype: the dtype on a CPU.
    """

    module: str
    name: str
    config: dict[str, Any]
    cpu: tuple[int, dict[str, int]]
    accelerator: tuple[int, dict[str, int]]
    cpu_dtype: str = "float32"


_HEADS = ("num_attention_heads", "num_key_value_heads")
_SIZE = ("hidden_size", "intermediate_size", "num_hidden_layers", *_HEADS)

CASES = {
    "vocabulary": Case(
        MODULE,
        "Qwen3",
        {"vocab_size": 151_936, "head_dim": 128, "tie_word_embeddings": True},
        cpu=(1024, dict(zip(_SIZE, (128, 384, 1, 2, 1), strict=True))),
        accelerator=(2048, dict(zip(_SIZE, (1024, 3072, 2, 16, 8), strict=True))),
    ),
    "experts": Case(
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
        "Qwen3Moe",
        {
            "vocab_size": 2048,
            "head_dim": 64,
            "tie_word_embeddings": True,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "output_router_logits": True,
        },
        cpu=(1024, dict(zip((*_SIZE, "moe_intermediate_size"), (256, 768, 2, 4, 2, 128), strict=True))),
        cpu_dtype="bfloat16",
        accelerator=(
            4096,
            dict(zip((*_SIZE, "moe_intermediate_size"), (1024, 3072, 2, 16, 8, 512), strict=True)),
        ),
    ),
}


class Side:
    """One of the two models of a case, and its steps: forward and backward, starting without gradients."""

    def __init__(self, case: Case, modeling: Any, device: str) -> None:
        import torch

        tokens, size = case.cpu if device == "cpu" else case.accelerator
        config = getattr(modeling, f"{case.name}Config")(**case.config, **size, use_cache=False)
        torch.manual_seed(0)
        model = getattr(modeling, f"{case.name}ForCausalLM")(config).train()
        dtype = getattr(torch, case.cpu_dtype if device == "cpu" else "bfloat16")
        self.model = model.to(device, dtype)
        self.device = device
        self.seconds: list[float] = []
        vocabulary = case.config["vocab_size"]
        self.input_ids = torch.randint(0, vocabulary, (1, tokens), device="cpu").to(device)

    def step(self) -> float:
        """Run a step and return the loss; gradients stay on the model."""
        loss = self.model(input_ids=self.input_ids, labels=self.input_ids).loss
        loss.backward()
        return float(loss.detach())

    def first(self) -> dict[str, Any]:
        """Run the first step, which is the warm-up; return its loss, the gradient norm and the peak memory.

        The peak is the maximum of torch's allocator minus its value at the start of the step, so it includes
        gradients but not weights.
        """
        import torch

        peak, loss = _peak_memory(self.step, self.device)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        self.model.zero_grad(set_to_none=True)
        return {"loss": loss, "gradient_norm": norm, "peak_bytes": peak}

    def timed(self) -> None:
        """Run a step and record its time; reading the loss waits for the device."""
        started = time.perf_counter()
        self.step()
        self.seconds.append(time.perf_counter() - started)
        self.model.zero_grad(set_to_none=True)


def reimport(name: str = MODULE) -> float:
    """Reimport one module and return the time in seconds; the modules that it imports stay loaded."""
    sys.modules.pop(name, None)
    gc.collect()
    started = time.perf_counter()
    importlib.import_module(name)
    return time.perf_counter() - started


def import_times(cache_dir: str) -> dict[str, float]:
    """Time the module's import: unpatched, patched with an empty cache, patched from the cache.

    Args:
        cache_dir: an empty folder for the cache.

    Returns:
        Seconds: `unpatched` and `warm` are medians of alternating imports, `cold` is the first patched import
        of this process (it loads the engine, then parses, patches and stores the module).
    """
    from veomni_hook import activate

    importlib.import_module(MODULE)

    def patched() -> float:
        with activate(cache_dir=cache_dir) as handle:
            seconds = reimport()
            _see_that_it_is_patched(handle, MODULE)
            del sys.modules[MODULE]
        return seconds

    cold = patched()
    turns = [(reimport(), patched()) for _ in range(ROUNDS)]
    unpatched, warm = (statistics.median(side) for side in zip(*turns, strict=True))
    return {"unpatched": unpatched, "cold": cold, "warm": warm}


def by_turns(case: Case, rounds: int, cache_dir: str) -> dict[str, Any]:
    """Train a model of the installed module and one of the patched module in alternating steps.

    Returns:
        `tokens`, `config`, `parameters`, `experts_implementation` (of transformers, None where the model has
        no experts), `dtype`, `tolerance`, and for `plain` and `hooked` the `loss`, `gradient_norm` and
        `peak_bytes` of the first step and the `step_seconds` of the others; `kernels` is the result of
        `veomni_hook.explain` for the hooked model.
    """
    from veomni_hook import activate, explain

    device = accelerator.best()
    # The plain model takes its first step before the hook is active, so it uses unpatched transformers only.
    plain = Side(case, importlib.import_module(case.module), device)
    found: dict[str, Any] = {"plain": plain.first()}
    if explain(plain.model).rows:
        raise SystemExit(
            f"{case.module} is patched before the hook is active; there is nothing to compare with"
        )
    del sys.modules[case.module]
    with activate(cache_dir=cache_dir) as handle:
        hooked = Side(case, importlib.import_module(case.module), device)
        _see_that_it_is_patched(handle, case.module)
        found["hooked"] = hooked.first()
        for _ in range(rounds):
            plain.timed()
            hooked.timed()
        kernels = [line.strip() for line in str(explain(hooked.model)).splitlines()[1:]]
        del sys.modules[case.module]
    for name, side in (("plain", plain), ("hooked", hooked)):
        found[name]["step_seconds"] = side.seconds
    config = plain.model.config
    dtype = str(plain.model.dtype).removeprefix("torch.")
    return {
        "module": case.module,
        "tokens": plain.input_ids.numel(),
        "config": {**case.config, **(case.cpu if device == "cpu" else case.accelerator)[1]},
        "parameters": sum(parameter.numel() for parameter in plain.model.parameters()),
        "experts_implementation": config._experts_implementation if "num_experts" in case.config else None,
        "dtype": dtype,
        "tolerance": TOLERANCES[dtype],
        "kernels": kernels,
        **found,
    }


def _see_that_it_is_patched(handle: Any, module: str) -> None:
    outcome = handle.status().modules[module]
    if not outcome.patched:
        raise SystemExit(f"{module} was not patched: {outcome.reason}")


def _peak_memory(step: Callable[[], Any], device: str) -> tuple[int, Any]:
    """Return the peak of the allocator during ``step()``, and its result."""
    from veomni_hook.bench.timing import peak_bytes

    gc.collect()
    taken: list[Any] = []
    peak = peak_bytes(lambda: taken.append(step()), device)
    return peak, taken[0]


def machine() -> dict[str, Any]:
    """Return the versions, the device and its threads; imports torch."""
    import torch
    import transformers

    device = accelerator.best()
    name = "CPU" if device == "cpu" else accelerator.module(device).get_device_name()
    return {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "device": device,
        "device_name": name,
        "threads": torch.get_num_threads(),
    }


def main(cache_dir: str, rounds: int, parts: list[str]) -> dict[str, Any]:
    """Measure the parts, the one with import times first: it needs an empty cache.

    Args:
        cache_dir: an empty folder for the cache.
        rounds: number of timed steps of each of the two models.
        parts: `imports` or names of `CASES`, in any order.
    """
    from veomni_hook import activate

    # As in a script that starts with the hook: transformers' own modules then record which implementation of
    # experts the user chose, and change nothing else. The modeling modules of both sides are imported later.
    with activate(cache_dir=str(Path(cache_dir, "transformers"))):
        for name in ("transformers.modeling_utils", "transformers.modeling_layers"):
            importlib.import_module(name)
    cache_dir = str(Path(cache_dir, "models"))
    for part in parts:
        importlib.import_module(CASES[part].module if part in CASES else MODULE)
    found = machine()
    print("ready", flush=True)
    sys.stdin.readline()
    if "imports" in parts:
        print("part imports", flush=True)
        found["imports"] = import_times(cache_dir)
    for part in CASES:
        if part in parts:
            print(f"part {part}", flush=True)
            found[part] = by_turns(CASES[part], rounds, cache_dir)
    return found


if __name__ == "__main__":
    _, _output, _cache_dir, _rounds, *_parts = sys.argv
    Path(_output).write_text(json.dumps(main(_cache_dir, int(_rounds), _parts)), encoding="utf-8")
