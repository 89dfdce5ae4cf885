"""Many processes that import the same modules at the same moment, from one empty cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.stress import stand
from tests.stress.kills import complete_entries, defects
from tests.stress.result import Line, Part

#: Waits until all are ready, starts, and writes what it found. Arguments: two descriptors, the result's file.
SMALL = """
import json, os, sys
from pathlib import Path
import veomni_hook.install
from tests.stress import stand
ready, go = int(sys.argv[1]), int(sys.argv[2])
os.write(ready, b"1")
os.read(go, 1)
found = stand.outcome(Path(os.environ["VEOMNI_CACHE_DIR"]))
Path(sys.argv[3]).write_text(json.dumps(found))
"""
#: The same with the installed transformers.
REAL = """
import json, os, sys
from hashlib import blake2b
from pathlib import Path
import veomni_hook.install
import torch, transformers
ready, go = int(sys.argv[1]), int(sys.argv[2])
os.write(ready, b"1")
os.read(go, 1)
import transformers.models.qwen3.modeling_qwen3 as modeling
config = transformers.Qwen3Config(hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=128,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=64)
torch.manual_seed(0)
torch.set_num_threads(1)
model = modeling.Qwen3ForCausalLM(config).train()
ids = torch.arange(24).reshape(2, 12)
loss = model(input_ids=ids, labels=ids).loss
loss.backward()
outcomes = veomni_hook.install.handle.status().modules
patched = {name: one for name, one in outcomes.items() if one.patched}
text = {name: blake2b(Path(one.stored).read_bytes(), digest_size=12).hexdigest() for name, one in patched.items()}
gradient = sum(p.grad.double().abs().sum().item() for p in model.parameters())
Path(sys.argv[3]).write_text(json.dumps({
    "values": [loss.item(), gradient], "texts": text, "codes": {}, "warnings": [],
    "cache": {name: one.cache for name, one in patched.items()},
}))
"""
#: Seconds after which starts hang.
_PATIENCE = 900


def starts(folder: Path, count: int, real: int, seed: int) -> Part:
    """Start `count` small programs at once on an empty cache, then `real` ones with the installed transformers."""
    began = time.monotonic()
    part = Part("starts", seed)
    part.lines.append(_together(part, folder / "small", "at once, of a small package", SMALL, count))
    if real:
        line = _together(part, folder / "real", "at once, of the installed transformers", REAL, real)
        part.lines.append(line)
    part.seconds = time.monotonic() - began
    return part


def _together(part: Part, folder: Path, what: str, program: str, count: int) -> Line:
    """One group of starts on a cache of their own, and one more afterwards."""
    folder.mkdir(parents=True)
    line = Line(what, count)

    def fail(kind: str, text: str) -> None:
        part.fail(line, kind, f"{what}: {text}")

    found = _run(folder, program, count, fail)
    again = _run(folder, program, 1, fail, "again")
    if again:
        _look(folder / "cache", found, again[0], fail)
        if program is SMALL and again[0]["values"] != stand.VALUES:
            fail("wrong", f"a start computes {again[0]['values']}")
    patched = sum(set(one["cache"].values()) != {"hit"} for one in found)
    known = len(complete_entries(folder / "cache"))
    line.note = f"{patched} of them patched and published, {known} keys stored"
    return line


def _look(cache: Path, found: list[stand.Started], again: stand.Started, fail: Any) -> None:
    """Hold what starts found, and the cache that they left, against a start afterwards."""
    expected = stand.expected(again)
    for one in found:
        if stand.expected(one) != expected:
            fail("wrong", f"{stand.expected(one)} and not {expected}")
        if one["warnings"]:
            fail("failed", f"warnings: {one['warnings']}")
    for path, reason in defects(cache):
        fail("lost", f"{path}: {reason}")
    if set(again["cache"].values()) != {"hit"}:
        fail("lost", f"the next start does not find everything: {again['cache']}")
    for path in cache.rglob("*.tmp"):
        fail("failed", f"{path} is left over")


def _run(folder: Path, program: str, count: int, fail: Any, name: str = "start") -> list[stand.Started]:
    """Processes that begin together; what each of them found."""
    environment = stand.environment(folder)
    if program is REAL:
        environment |= {"PYTHONPATH": str(stand.ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        del environment["VEOMNI_PATCHES"]
    ready, is_ready = os.pipe()
    go, goes = os.pipe()
    results = [folder / f"{name}{number}.json" for number in range(count)]
    running = []
    for result in results:
        with result.with_suffix(".err").open("wb") as errors:
            command = [sys.executable, "-c", program, str(is_ready), str(go), str(result)]
            running.append(
                subprocess.Popen(command, env=environment, cwd=folder, stderr=errors, pass_fds=(is_ready, go))
            )
    os.close(is_ready)
    os.close(go)
    arrived = 0
    while arrived < count and (more := os.read(ready, count)):
        arrived += len(more)
    os.close(goes)
    os.close(ready)
    found = []
    for process, result in zip(running, results, strict=True):
        try:
            status = process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        errors_said = result.with_suffix(".err").read_text(errors="replace")
        if status or not result.exists():
            fail("failed", f"a start ended with status {status}: {errors_said[-600:]}")
            continue
        found.append(json.loads(result.read_text()))
        if "VeomniHookWarning" in errors_said:
            fail("failed", f"a start warned: {errors_said[-600:]}")
    return found
