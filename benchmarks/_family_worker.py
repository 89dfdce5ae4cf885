"""A process of `families_gpu` that trains some sides: one JSON request a line in, one JSON answer a line out.

``build`` makes a family's model and runs the first step of a side, ``steps`` measures some more of it, and
``decode`` generates text. ``drop`` frees the models.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks._families import Family

#: Steps of a turn that are not measured: the allocator's memory went back after the last turn.
WARM = 2
NEW_TOKENS = 64
#: The modes of torch.compile, by side.
MODES = {
    "compile": None,
    "compile+masks": None,
    "ours+compile": None,
    "compile+graphs": "reduce-overhead",
    "ours+graphs": "reduce-overhead",
    "ours+layers+graphs": "reduce-overhead",
}


class Worker:
    """The models of one process, by side."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.family: Family
        self.model: Any = None
        self.ids: Any = None
        self.runs: dict[str, Callable[..., Any]] = {}
        self.precision = "none"
        self.products: Any = None

    def build(self, family: list[Any], side: str) -> dict[str, Any]:
        """Make the model, if no other side did, and run the first step."""
        import torch

        if self.model is None:
            self._make(Family(*family), liger=side == "liger")
        self.runs[side], compiled = self.model, side in MODES
        if side == "floor":
            return self._keep_products()
        if "layers" in side:
            for layer in self.model.model.layers:
                layer.compile(mode=MODES[side])
        elif compiled:
            self.runs[side] = torch.compile(self.model, mode=MODES[side])
        before = _counted()
        self._synchronize()
        began = time.perf_counter()
        loss = self._step(side).item()
        first = time.perf_counter() - began
        facts: dict[str, Any] = {"first_step_s": round(first, 2), "loss": loss} | self._of_gradients()
        if compiled:
            after = _counted()
            facts["graph_breaks"] = after["graph_breaks"] - before["graph_breaks"]
        self._clear()
        return facts

    def steps(self, side: str, number: int) -> dict[str, Any]:
        """Return the milliseconds of ``number`` steps, the peak above the model, and new compiled graphs.

        Each step is waited for; then as many follow one another without waiting, as in a training loop.
        """
        import torch

        before, times, peak = _counted()["graphs"], [], 0.0
        for turn in range(WARM + number):
            self.model.zero_grad(set_to_none=True)
            self._synchronize()
            if self.device == "cuda":
                held = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            self._step(side)
            self._synchronize()
            if turn >= WARM:
                times.append(1e3 * (time.perf_counter() - began))
            if self.device == "cuda":
                peak = max(peak, (torch.cuda.max_memory_allocated() - held) / 2**30)
        began = time.perf_counter()
        for _ in range(number):
            self.model.zero_grad(set_to_none=True)
            self._step(side)
        self._synchronize()
        row = 1e3 * (time.perf_counter() - began) / number
        self._clear()
        new = _counted()["graphs"] - before
        return {"ms": times, "in_a_row_ms": row, "extra_gib": peak, "recompilations": new}

    def decode(self, cache: str) -> dict[str, Any]:
        """Return the tokens per second of greedy decoding with a dynamic or a static (compiled) cache."""
        import torch

        self.model.eval()
        options: dict[str, Any] = {
            "max_new_tokens": NEW_TOKENS,
            "min_new_tokens": NEW_TOKENS,
            "do_sample": False,
        }
        if cache == "static":
            options["cache_implementation"] = "static"
        taken = []
        with torch.no_grad():
            for _ in range(4):
                self._synchronize()
                began = time.perf_counter()
                self.model.generate(self.ids[:1, :16], **options)
                self._synchronize()
                taken.append(time.perf_counter() - began)
        self.model.train()
        self._clear()
        return {"tokens_per_s": round(NEW_TOKENS / statistics.median(taken[1:]), 2)}

    def profile(self, side: str) -> dict[str, Any]:
        """Return the kernels of a step, each with its number of calls and milliseconds, the longest first."""
        from torch.profiler import ProfilerActivity, profile

        self._step(side)
        self.model.zero_grad(set_to_none=True)
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            self._step(side)
            self._synchronize()
        rows = [
            (event.key[:90], event.count, round(event.self_device_time_total / 1e3, 3))
            for event in recorded.key_averages()
            if event.self_device_time_total
        ]
        self._clear()
        return {"kernels": sorted(rows, key=lambda row: -row[2])[:60]}

    def drop(self) -> dict[str, Any]:
        """Free everything of this family."""
        import torch

        self.model = self.ids = self.products = None
        self.precision = "none"
        self.runs.clear()
        torch.compiler.reset()
        self._clear()
        return {}

    def _make(self, family: Family, *, liger: bool) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        if liger:
            from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

            MODEL_TYPE_TO_APPLY_LIGER_FN[family.model_type]()
        self.family = family
        config = AutoConfig.for_model(family.model_type, **family.fields)
        torch.manual_seed(0)
        chosen = {} if family.attention is None else {"attn_implementation": family.attention}
        with torch.device(self.device):
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **chosen).train()
        generator = torch.Generator().manual_seed(1)
        shape = family.batch, family.length
        self.ids = torch.randint(0, config.vocab_size, shape, generator=generator).to(self.device)

    def _of_gradients(self) -> dict[str, Any]:
        import torch

        norm = torch.stack([p.grad.float().norm() for p in self.model.parameters() if p.grad is not None])
        return {"gradient_norm": norm.norm().item()}

    def _multiply_as(self, side: str) -> None:
        """Bind the model to the format of the side; two models would leave less room for layers."""
        from veomni_hook.settings import FORMATS

        precision = next((name for name in FORMATS if side.endswith(name)), "none")
        if precision != self.precision:
            from veomni_hook import bind

            bind(self.model, precision=precision)
            self.precision = precision

    def _step(self, side: str) -> Any:
        if side == "floor":
            return self.products.again()
        self._multiply_as(side)
        loss = self.runs[side](input_ids=self.ids, labels=self.ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def _keep_products(self) -> dict[str, Any]:
        """Run a step for the products and the attention that the side ``floor`` has."""
        from benchmarks._floor import Products

        with Products() as self.products:
            self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss.backward()
        self._clear()
        return {}

    def _synchronize(self) -> None:
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()

    def _clear(self) -> None:
        import torch

        if self.model is not None:
            self.model.zero_grad(set_to_none=True)
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()  # the next side is in another process


def _counted() -> dict[str, int]:
    from torch._dynamo.utils import counters

    return {
        "graph_breaks": sum(counters["graph_break"].values()),
        "graphs": counters["stats"]["unique_graphs"],
    }


def serve(kind: Callable[[str], Any]) -> None:
    """Answer the requests to a worker, which ``kind`` makes for a device, until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes beside the answers
    hook, device = sys.argv[1:]
    if hook != "none":
        from veomni_hook import activate

        activate(kernels=hook)
    worker = kind(device)
    # Now, while the other processes load them, too, and not at the first request, for which the others wait.
    import torch
    from transformers import AutoModelForCausalLM

    del torch, AutoModelForCausalLM
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(worker, request.pop("do"))(**request)
        except Exception as error:  # reported; the other sides go on
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve(Worker)
