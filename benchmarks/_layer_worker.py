"""A process of `linear_attention_gpu`: a worker of `families_gpu` that can also train one layer alone."""

from __future__ import annotations

from typing import Any

from benchmarks._families import Family
from benchmarks._family_worker import Worker, serve


class LayerWorker(Worker):
    """A model, or a layer of linear attention that is trained from hidden states."""

    def _make(self, family: Family, *, liger: bool) -> None:
        fields = dict(family.fields)
        if not fields.pop("alone", False):
            super()._make(family, liger=liger)
            return
        import torch
        from transformers import AutoConfig
        from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

        config = AutoConfig.for_model(family.model_type, **fields)
        torch.manual_seed(0)
        with torch.device(self.device):
            self.model = Qwen3NextGatedDeltaNet(config, 0).to(torch.bfloat16).train()
            shape = family.batch, family.length, config.hidden_size
            self.ids = torch.randn(shape, dtype=torch.bfloat16).requires_grad_()
            self.gradient = torch.randn(shape, dtype=torch.bfloat16)

    def _step(self, side: str) -> Any:
        if not self.ids.is_floating_point():
            return super()._step(side)
        import torch

        self.ids.grad = None
        output = self.runs[side](self.ids)
        output.backward(self.gradient)
        return torch.linalg.vector_norm(output.detach(), dtype=torch.float32)


if __name__ == "__main__":
    serve(LayerWorker)
