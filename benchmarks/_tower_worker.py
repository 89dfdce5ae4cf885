"""A process of `towers_gpu`: a worker of `families_gpu` whose models take images."""

from __future__ import annotations

import inspect
from typing import Any

from benchmarks._families import Family
from benchmarks._family_worker import Worker, serve

#: Tokens that mark images and sounds: text has none below 2,000.
IMAGE, START, END, AUDIO, AUDIO_START, AUDIO_END = range(1001, 1007)
_TOKENS = {
    "image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END,
    "audio_token_id": AUDIO, "audio_start_token_id": AUDIO_START, "audio_end_token_id": AUDIO_END,
}  # fmt: skip


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
        measured = "images", "sounds", "tower"
        fields = {name: each for name, each in family.fields.items() if name not in measured}
        config = AutoConfig.for_model(family.model_type, **fields, **_TOKENS, tie_word_embeddings=False)
        torch.manual_seed(0)
        with torch.device(self.device):
            self.model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).train()
        self._add_batches(config)
        if family.fields.get("tower"):
            self.model = self.model.model.visual

    def _add_batches(self, config: Any) -> None:
        import torch

        from veomni_hook.multimodal import collate_metadata

        generator = torch.Generator().manual_seed(1)
        fields = self.family.fields
        add = _images if "images" in fields else _sounds
        pieces, batch = add(config, fields.get("images") or fields["sounds"], generator)
        shape = self.family.batch, self.family.length
        text = torch.randint(2000, config.get_text_config().vocab_size, shape, generator=generator)
        each = len(pieces) // len(text)
        rows = [torch.cat([*pieces[row * each : (row + 1) * each], words]) for row, words in enumerate(text)]
        ids = torch.stack(rows)
        batch |= {"input_ids": ids, "labels": ids, "mm_token_type_ids": (ids == IMAGE).int()}
        batch = {name: each for name, each in batch.items() if name in parameters(self.model)}
        for known, made in ((False, dict(batch)), (True, collate_metadata(config)(dict(batch)))):
            self.batches[known] = {name: each.to(self.device) for name, each in made.items()}

    def _step(self, side: str) -> Any:
        known = side.endswith("+metadata")
        batch = self.batches[known]
        if not known:
            # As new as a batch is in training: values that the hook read in an earlier step are not at hand.
            batch = {name: each if each.is_floating_point() else each.clone() for name, each in batch.items()}
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


def parameters(model: Any) -> set[str]:
    """Return the names of what the model's forward takes."""
    return set(inspect.signature(type(model).forward).parameters)


def _images(config: Any, sizes: list[list[int]], generator: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return each image's tokens, and the images as a processor gives them."""
    import torch

    sight, grid = config.vision_config, torch.tensor(sizes)
    width = sight.in_channels * sight.temporal_patch_size * sight.patch_size**2
    counts = grid.prod(-1) // sight.spatial_merge_size**2
    pieces = [torch.tensor([START, *[IMAGE] * int(count), END]) for count in counts]
    pixels = torch.randn(int(grid.prod(-1).sum()), width, generator=generator)
    return pieces, {"image_grid_thw": grid, "pixel_values": pixels}


def _sounds(config: Any, lengths: list[int], generator: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return each sound's tokens, 13 for 100 frames, and the sounds as a processor gives them."""
    import torch

    pieces = [torch.tensor([AUDIO_START, *[AUDIO] * (length // 100 * 13), AUDIO_END]) for length in lengths]
    shape = len(lengths), config.audio_config.num_mel_bins, max(lengths)
    frames = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    features = torch.randn(shape, generator=generator)
    return pieces, {"input_features": features, "feature_attention_mask": frames.long()}


if __name__ == "__main__":
    serve(TowerWorker)
