"""Host time of guards: `python -m benchmarks.guard_host_time --against CHECKOUT`.

What a guard asks before each call, alone, and a training step that is bound by the host (28 small layers),
with this checkout and with another one of an earlier commit, in turn. Nothing of the step waits for the
device but its end. Times are the best of many repetitions. Guards are timed without audit hooks and with one:
newer releases of filelock add one, and then each `sys._getframe`, `f_code` and `__code__` takes longer.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._record import RESULTS

ROOT = Path(__file__).resolve().parents[1]
ROUNDS, REPEATS, CALLS = 3, 100, 1000
LAYERS, STEPS = 28, 40
SIZES = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


def main() -> None:
    """Measure both checkouts by turns, print a table and record it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, required=True, help="a checkout of an earlier commit")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    best: dict[str, dict[str, float]] = {"before": {}, "now": {}}
    machine: dict[str, Any] = {}
    for _ in range(ROUNDS):
        for side, checkout in (("before", options.against.resolve()), ("now", ROOT)):
            times, machine = _run(checkout)
            for name, value in times.items():
                best[side][name] = min(value, best[side].get(name, value))
    for name, value in best["now"].items():
        before = best["before"][name]
        print(f"{name:40} {before:9.2f} {value:9.2f} {value - before:+7.2f}")
    out = options.out or RESULTS / f"guard_host_time-{machine['device_type']}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**machine, "command": " ".join(sys.argv), **best}, indent=1) + "\n")


def _run(checkout: Path) -> tuple[dict[str, float], dict[str, Any]]:
    # Of the other checkout comes everything but this script.
    code = (
        "import importlib.util, json;"
        f"spec = importlib.util.spec_from_file_location('worker', {str(Path(__file__).resolve())!r});"
        "worker = importlib.util.module_from_spec(spec); spec.loader.exec_module(worker);"
        "print(json.dumps(worker.measured()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=checkout, env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    times, machine = json.loads(done.stdout.splitlines()[-1])
    return times, machine


def measured() -> tuple[dict[str, float], dict[str, Any]]:
    """Return the times of the checkout that is imported, and the machine."""
    add_hook, sys.addaudithook = sys.addaudithook, lambda hook: None
    import tempfile

    import torch
    import transformers

    import veomni_hook
    from tests.kernels.patched_qwen3 import load

    device = "cuda" if torch.cuda.is_available() else "cpu"
    _choose("triton" if device == "cuda" else "torch")
    torch.set_num_threads(1)
    times: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        guards = {}
        for family, prefix in (("qwen3", "Qwen3"), ("gemma3", "Gemma3")):
            module = load(Path(folder), f"transformers.models.{family}.modeling_{family}")
            for name, ask in _guards(module, prefix, device).items():
                guards[f"{family}: {name}"] = ask
        for name, ask in guards.items():
            times[f"{name}, µs"] = _best(ask)
        add_hook(lambda *_: None)
        for name, ask in guards.items():
            times[f"{name}, audited, µs"] = _best(ask)
        module = load(Path(folder), "transformers.models.qwen3.modeling_qwen3")
        times[f"a step of {LAYERS} small layers, ms"] = _step(module, device)
    return times, {
        "device_type": device,
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "version": veomni_hook.__version__,
    }


def _choose(backend: str) -> None:
    for name in ("selection.process_choice", "selection.state", "state"):  # the last two: earlier checkouts
        try:
            importlib.import_module(f"veomni_hook.kernels.{name}").set_choice(backend)
        except ModuleNotFoundError:
            continue
        return
    raise SystemExit("this checkout has no process-wide choice of kernels where this script looks for it")


def _guards(module: Any, prefix: str, device: str) -> dict[str, Callable[[], Any]]:
    import torch

    def slot(op: str) -> Any:
        return next(each for name, each in vars(module).items() if name.startswith(f"veomni_{op}_"))

    def bare(name: str) -> Any:
        made = object.__new__(getattr(module, prefix + name))
        torch.nn.Module.__init__(made)
        return made

    kind = getattr(module, f"{prefix}RMSNorm")
    norm, head = kind(64).to(device), kind(32).to(device)
    eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    x, table = torch.randn(2, 16, 64, device=device), torch.randn(2, 16, 32, device=device)
    layer, attention, mlp = bare("DecoderLayer"), bare("Attention"), bare("MLP")
    activation, turn = torch.nn.SiLU(), module.apply_rotary_pos_emb
    turned = (x, head, head, kind, turn, (table, table))
    if re.search(r"__name__,?\s*\)\) is not None", inspect.getsource(module)):
        turned = (*turned, module.__name__)  # a checkout that `--against` names may still ask for it
    slots = [slot(op) for op in ("rms_norm", "add_rms_norm", "rotary", "qk_norm_rotary", "gated_mlp")]
    guards = {
        "rms_norm": lambda: slots[0].kernel(norm, x, norm.weight, eps),
        "add_rms_norm": lambda: slots[1].kernel(layer, x, x, norm, kind),
        "rotary, at its call": lambda: slots[2].at(attention, turn),
        "qk_norm_rotary": lambda: slots[3].kernel(attention, *turned),
        "gated_mlp": lambda: slots[4].kernel(mlp, x, activation),
    }
    for each, ask in zip(slots, guards.values(), strict=True):
        each._asker, each._scope = ask.__code__, globals()  # as if the patched text asked
    return guards


def _best(ask: Callable[[], Any]) -> float:
    if ask() is None:
        raise SystemExit("no kernel answers: this measures nothing")
    return min(timeit.repeat(ask, number=CALLS, repeat=REPEATS, timer=time.process_time)) / CALLS * 1e6


def _step(module: Any, device: str) -> float:
    import torch
    from transformers import Qwen3Config

    config = Qwen3Config(
        **SIZES, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, use_cache=False
    )
    model = module.Qwen3ForCausalLM(config).to(device).train()
    ids = torch.randint(0, 512, (1, 64), device=device)
    found = []
    for _ in range(STEPS):
        model.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append((time.perf_counter() - start) * 1e3)
    return min(found)


if __name__ == "__main__":
    main()
