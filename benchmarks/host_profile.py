"""Where the host's time goes: `python -m benchmarks.host_profile --against CHECKOUT`.

A token of decoding and a training step of Qwen3 with 28 narrow layers, on a CPU, with this checkout and with
another one of an earlier commit. Kernels of normalisations, rotations and gated products are not launched.
All else that the host does for them runs (`tests.kernels.fake_launches`), except Triton's own launch code.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib.util
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LAYERS, TOKENS, STEPS = 28, 16, 8
SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
#: The first pattern that a file's path contains names what it is for.
PARTS = (
    ("kernels/slot", "guards: slots"),
    ("kernels/selection", "guards: slots"),
    ("skipped_calls", "guards: checks"),
    ("operand_checks", "guards: checks"),
    ("module_calls", "guards: checks"),
    ("shared/activations", "guards: checks"),
    ("called_function", "guards: checks"),
    ("shared/", "kernels: launches, operators"),
    ("kernels/", "kernels: checks, plans, results"),
    ("_with_slots", "the model's code"),
    ("/models/qwen3/", "the model's code"),
    ("torch/autograd", "torch: autograd"),
    ("torch/nn", "torch: modules"),
    ("transformers/", "transformers: generate, masks, caches"),
)


def main() -> None:
    """Profile both checkouts and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, required=True, help="a checkout of an earlier commit")
    options = parser.parse_args()
    before, now = _run(options.against.resolve()), _run(ROOT)
    for what in now:
        print(f"\n{what:44} {'before':>9} {'now':>9}")
        for part in sorted(now[what], key=lambda part: -before[what].get(part, 0)):
            print(f"{part:44} {before[what].get(part, 0):9.0f} {now[what][part]:9.0f}")


def _run(checkout: Path) -> dict[str, dict[str, float]]:
    # Of the other checkout comes everything but this script and the doubles.
    code = f"import runpy; runpy.run_path({str(Path(__file__).resolve())!r})['work']()"
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=checkout,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def work() -> None:
    """Print, as JSON, the profiles of the checkout that is imported."""
    place = ROOT / "tests" / "kernels" / "fake_launches.py"
    spec = importlib.util.spec_from_file_location("fake_launches", place)
    assert spec is not None and spec.loader is not None
    doubles = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(doubles)
    import torch
    from transformers import Qwen3Config

    from tests.kernels.patched_qwen3 import load

    torch.set_num_threads(1)
    config = Qwen3Config(**SIZES, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2)
    with tempfile.TemporaryDirectory() as folder, doubles.faked():
        model = load(Path(folder)).Qwen3ForCausalLM(config)
        ids = torch.randint(0, 512, (1, 16))
        prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

        def decode() -> None:
            model.eval().generate(
                **prompt, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, pad_token_id=0
            )

        def step() -> None:
            model.train()
            for _ in range(STEPS):
                model.zero_grad()
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

        print(
            json.dumps(
                {
                    "decoding, µs a token": _profile(decode, TOKENS),
                    "a training step, µs": _profile(step, STEPS),
                }
            )
        )


def _profile(call: Callable[[], None], times: int) -> dict[str, float]:
    """Return microseconds and Python calls of one of ``times`` repetitions, by part."""
    call()
    walls = []
    for _ in range(5):
        start = time.process_time()
        call()
        walls.append((time.process_time() - start) / times * 1e6)
    profile = cProfile.Profile(timer=time.process_time)  # other processes do not count
    profile.runcall(call)
    found: dict[str, float] = defaultdict(float)
    calls = 0.0
    stats: Any = pstats.Stats(profile)
    for (file, _, _), (_, count, own, _, callers) in stats.stats.items():
        if file != "~":
            found[f"  {_part(file)}"] += own / times * 1e6
            calls += count / times
            continue
        # A C function counts for whoever calls it.
        for (caller, _, _), (_, _, spent, _) in callers.items():
            found[f"  {_part(caller)}"] += spent / times * 1e6
    return {
        "in all": min(walls),
        "Python calls": calls,
        "in all, in the profile": sum(found.values()),
        **found,
    }


def _part(file: str) -> str:
    return next((part for pattern, part in PARTS if pattern in file), "other")


if __name__ == "__main__":
    main()
