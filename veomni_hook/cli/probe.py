"""What the demo measures in a process of its own: import times, and one loss step at a large vocabulary.

`python -m veomni_hook.cli.probe CACHE_DIR` imports transformers, waits for a line on its standard input,
measures, and prints one JSON object. The eager loss step runs before the hook is active: it is the installed
transformers and nothing else. The cache folder must be empty.
"""

from __future__ import annotations

import gc
import importlib
import json
import statistics
import sys
import time
from typing import Any

from veomni_hook import accelerator

MODULE = "transformers.models.qwen3.modeling_qwen3"
VOCABULARY = 151_936
TOKENS = 1024
ROUNDS = 5


def reimport(name: str = MODULE) -> float:
    """Import one module anew and return the seconds that it took; what it imports stays loaded."""
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
        Seconds: `unpatched` and `warm` are medians of repeated imports, `cold` is the first patched import of
        this process (it parses, patches and stores the module, and loads the engine that does so).
    """
    from veomni_hook import activate

    importlib.import_module(MODULE)
    unpatched = statistics.median(reimport() for _ in range(ROUNDS))
    del sys.modules[MODULE]
    with activate(cache_dir=cache_dir) as handle:
        cold = reimport()
        outcome = handle.status().modules[MODULE]
        if not outcome.patched:
            raise SystemExit(f"{MODULE} was not patched: {outcome.reason}")
        warm = statistics.median(reimport() for _ in range(ROUNDS))
        del sys.modules[MODULE]
    return {"unpatched": unpatched, "cold": cold, "warm": warm}


def loss_step() -> dict[str, Any]:
    """Run one forward and backward at the large vocabulary with the module as it is loaded now.

    Returns:
        `loss`, `seconds`, `peak_bytes` (the most that the allocator held above the start of the step,
        gradients included and weights not), and `kernels` (what `veomni_hook.explain` tells afterwards).
    """
    import torch

    from veomni_hook import explain

    modeling = importlib.import_module(MODULE)
    torch.manual_seed(0)
    device = accelerator.best()
    config = modeling.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = modeling.Qwen3ForCausalLM(config).train().to(device)
    input_ids = torch.randint(0, VOCABULARY, (1, TOKENS), device=device)

    def step() -> float:
        loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        return float(loss.detach())

    peak, (loss, seconds) = _peak_memory(step, device)
    kernels = [line.strip() for line in str(explain(model)).splitlines()[1:]]
    return {"loss": loss, "seconds": seconds, "peak_bytes": peak, "device": device, "kernels": kernels}


def _peak_memory(step: Any, device: str) -> tuple[int, tuple[float, float]]:
    """Return the peak of the allocator during ``step()``, and its result with the seconds that it took."""
    from veomni_hook.bench.timing import peak_bytes

    gc.collect()
    taken: list[tuple[float, float]] = []
    peak = peak_bytes(lambda: taken.append(_timed(step)), device)
    return peak, taken[0]


def _timed(step: Any) -> tuple[float, float]:
    started = time.perf_counter()
    result = step()
    return result, time.perf_counter() - started


def main(cache_dir: str) -> dict[str, Any]:
    """Measure everything, in the order that keeps the eager step unpatched.

    Args:
        cache_dir: an empty folder for the cache.
    """
    from veomni_hook import activate

    importlib.import_module(MODULE)
    sys.stdin.readline()
    eager = loss_step()
    times = import_times(cache_dir)
    with activate(cache_dir=cache_dir, kernels="linear_cross_entropy=torch"):
        chunked = loss_step()
    return {
        "import_seconds": times,
        "vocabulary": VOCABULARY,
        "tokens": TOKENS,
        "eager": eager,
        "chunked": chunked,
    }


if __name__ == "__main__":
    json.dump(main(sys.argv[1]), sys.stdout)
