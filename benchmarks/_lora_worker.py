"""A process of `lora_step_gpu`: the requests are those of `_family_worker`, the model has PEFT's adapters."""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

from benchmarks._families import Family, shape
from benchmarks._family_worker import Worker, serve

RANK = 16
#: Whether models have the gradient checkpointing of their library; a process is started so.
CHECKPOINTED = bool(os.environ.get("BENCH_CHECKPOINTED"))


class Case(NamedTuple):
    """What is trained.

    Attributes:
        family: the model.
        modules: what PEFT calls ``target_modules``.
        parameters: what it calls ``target_parameters``.
        float32: whether the adapters are float32, as they are by default.
    """

    family: Family
    modules: str | list[str]
    parameters: list[str] | None
    float32: bool


_DENSE = Family("qwen3", shape(4096, 12288, 4, "32 8 128", 151_936))
_EXPERTS = Family(
    "qwen3_moe",
    shape(2048, 6144, 4, "32 4 128", 151_936)
    | {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
)
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_WEIGHTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

CASES = {
    f"{name}, adapters in {'float32' if float32 else 'bfloat16'}": Case(family, modules, parameters, float32)
    for name, family, modules, parameters in (
        ("Qwen3-8B", _DENSE, "all-linear", None),
        ("Qwen3-30B-A3B", _EXPERTS, _ATTENTION, _WEIGHTS),
    )
    for float32 in (False, True)
}


class LoraWorker(Worker):
    """A `Worker` whose models have adapters."""

    def build(self, family: list[Any], side: str) -> dict[str, Any]:
        """Make the model of a `Case`, if no other side did, and run the first step."""
        import peft

        case = Case(*family)
        self.case = case._replace(family=Family(*case.family))
        return super().build(list(self.case.family), side) | {"peft": peft.__version__}

    def explain(self) -> dict[str, Any]:
        """Return the lines of `explain` about linear layers and experts with adapters."""
        import veomni_hook

        lines = str(veomni_hook.explain(self.model)).splitlines()
        told = [each.strip() for each in lines if "low_rank_linear/" in each or "moe_experts/" in each]
        return {"explain": told}

    def fits(self, length: int, beside: int) -> dict[str, Any]:
        """Return what a step of ``length`` tokens takes beside an allocation of bytes, or ``full``."""
        import torch

        generator = torch.Generator().manual_seed(length)
        self.ids = torch.randint(0, self.case.family.fields["vocab_size"], (1, length), generator=generator)
        self.ids = self.ids.to(self.device)
        try:
            ballast = torch.empty(beside, dtype=torch.uint8, device=self.device)
            torch.cuda.reset_peak_memory_stats()
            self._synchronize()
            began = time.perf_counter()
            loss = self._step(next(iter(self.runs))).item()
            self._synchronize()
            seconds = round(time.perf_counter() - began, 2)
            del ballast
            return {
                "length": length,
                "seconds": seconds,
                "peak": torch.cuda.max_memory_allocated(),
                "loss": loss,
            }
        except torch.OutOfMemoryError as error:
            return {"length": length, "full": str(error).splitlines()[0][:200]}
        finally:
            self._clear()

    def _make(self, family: Family, *, liger: bool) -> None:
        import torch

        super()._make(family, liger=liger)
        self.model = self._with_adapters(
            r=RANK,
            lora_alpha=2 * RANK,
            target_modules=self.case.modules,
            target_parameters=self.case.parameters,
        ).train()
        torch.manual_seed(2)
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(torch.float32 if self.case.float32 else torch.bfloat16)
            if "lora_A" in name:  # as PEFT does, but with our seed: Unsloth sets its own
                torch.nn.init.kaiming_uniform_(parameter, a=5**0.5)
            if "lora_B" in name:  # PEFT begins with zeros, which have no gradient behind them
                torch.nn.init.normal_(parameter, std=0.01)
        if CHECKPOINTED:
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Enable transformers' gradient checkpointing."""
        self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def _with_adapters(self, **options: Any) -> Any:
        """Return the model with adapters that have these options of `peft.LoraConfig`."""
        import peft

        lora = peft.LoraConfig(task_type="CAUSAL_LM", **options)
        return peft.get_peft_model(self.model, lora, autocast_adapter_dtype=self.case.float32)

    def _of_gradients(self) -> dict[str, Any]:
        named = [(name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None]
        norms = {name: gradient.float().norm().item() for name, gradient in named}
        return {**super()._of_gradients(), "norms": norms}


if __name__ == "__main__":
    serve(LoraWorker)
