"""accelerate's loaders: the host keeps values of integers, processes that share sequences get the same ones.

Applies only where the setting ``host_values`` is on, or ``parallel`` has ``sp`` above 1: batches are then
compared, which needs no values of a device if the host knows them.
"""

from __future__ import annotations

from veomni_hook.patches.spec import PatchConfig

__all__ = ["config"]

config = PatchConfig(
    source_module="accelerate.data_loader",
    description="the host keeps values of integers; processes that share sequences get the same ones",
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
config.add_import("veomni_hook.parallel.data", ["dispatching as veomni_dispatching", "share as veomni_share"])
config.rewrite(
    "DataLoaderDispatcher.__init__",
    pattern="PartialState()",
    replacement="veomni_dispatching(PartialState())",
    description="how many shares of the data there are",
)
config.rewrite(
    "DataLoaderDispatcher.__iter__",
    pattern="slice(self.state.process_index * {size}, (self.state.process_index + 1) * {size})",
    replacement="slice(veomni_share(self.state) * {size}, (veomni_share(self.state) + 1) * {size})",
    description="which share this process gets",
)
config.rewrite(
    "DataLoaderDispatcher.__iter__",
    pattern="self.slice_fn({batch}, {part}, process_index=self.state.process_index, num_processes={all})",
    replacement="self.slice_fn({batch}, {part}, process_index=veomni_share(self.state), num_processes={all})",
    matches=2,
    description="the same, for a function of the script's that cuts batches",
)
