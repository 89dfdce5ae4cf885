"""A process of `towers_gpu`: a worker of `families_gpu` whose models take images."""

from __future__ import annotations

from typing import Any

from benchmarks._families import Family
from benchmarks._family_worker import Worker, serve

#: Tokens that mark images, at the end of no vocabulary.
IMAGE, START, END = 1001, 1002, 1003


class TowerWorker(Worker):
    """The models of one process, by side; batches with metadata and without."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.batches: dict[bool, dict[str, Any]] = {}

    def _make(self, family: Family, *, liger: bool) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForImageTextToText

        if liger:
            from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

            MODEL_TYPE_TO_APPLY_LIGER_FN[family.model_type]()
        self.family = family
        fields = {name: each for name, each in family.fields.items() if name not in ("images", "tower")}
        tokens = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END}
        config = AutoConfig.for_model(family.model_type, **fields, **tokens, tie_word_embeddings=False)
        torch.manual_seed(0)
        with torch.device(self.device):
            self.model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).train()
        self._add_batches(config)
        if family.fields.get("tower"):
            self.model = self.model.model.visual

    def _add_batches(self, config: Any) -> None:
        import torch

        from veomni_hook.multimodal import collate_metadata

        sight, images = config.vision_config, torch.tensor(self.family.fields["images"])
        merged = images.prod(-1) // sight.spatial_merge_size**2
        generator = torch.Generator().manual_seed(1)
        rows = []
        for part in merged.chunk(self.family.batch):
            text = (
                torch.randint(2000, 100_000, (self.family.length,), generator=generator)
                % config.text_config.vocab_size
            )
            pieces = [torch.tensor([START, *[IMAGE] * int(count), END]) for count in part]
            rows.append(torch.cat([*pieces, text]))
        ids = torch.stack(rows)
        width = sight.in_channels * sight.temporal_patch_size * sight.patch_size**2
        batch = {
            "input_ids": ids,
            "labels": ids,
            "mm_token_type_ids": (ids == IMAGE).int(),
            "image_grid_thw": images,
            "pixel_values": torch.randn(int(images.prod(-1).sum()), width, generator=generator),
        }
        for known, made in ((False, dict(batch)), (True, collate_metadata(config)(dict(batch)))):
            self.batches[known] = {name: each.to(self.device) for name, each in made.items()}

    def _step(self, side: str) -> Any:
        batch = self.batches[side.endswith("+metadata")]
        if self.family.fields.get("tower"):
            given = {
                name.removeprefix("image_"): each for name, each in batch.items() if name.startswith("image_")
            }
            # What upstream's model does with pixels before the tower.
            pixels = batch["pixel_values"].type(self.model.dtype)
            loss = self.runs[side](pixels, **given).pooler_output.float().mean()
        else:
            loss = self.runs[side](**batch, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def drop(self) -> dict[str, Any]:
        """Free everything of this case."""
        self.batches.clear()
        return super().drop()


if __name__ == "__main__":
    serve(TowerWorker)
