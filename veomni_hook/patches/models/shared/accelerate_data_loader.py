"""Data loaders that accelerate prepares: the host keeps the values of a batch's integers.

Applies only where the setting ``host_values`` is on.
"""

from __future__ import annotations

from veomni_hook.patches.spec import PatchConfig

__all__ = ["config"]

config = PatchConfig(
    source_module="accelerate.data_loader",
    description="the host keeps the values of a batch's integers",
)

config.add_import("veomni_hook.multimodal.batches", ["sent as veomni_sent"])
for place, batch, device in (
    ("DataLoaderShard.__iter__", "current_batch", "self.device"),
    ("DataLoaderDispatcher.__iter__", "batch", "self.state.device"),
):
    config.rewrite(
        place,
        pattern=f"send_to_device({batch}, {device}, non_blocking=self._non_blocking)",
        replacement=f"veomni_sent(send_to_device, {batch}, {device}, non_blocking=self._non_blocking)",
        description="notes the values when the batch goes to the device",
    )
