"""accelerate's loaders and gathers: processes that share sequences read the same batches, and count once.

Applies only where the setting ``parallel`` has ``sp`` above 1.
"""

from __future__ import annotations

from veomni_hook.patches.spec import PatchConfig

__all__ = ["config"]

config = PatchConfig(
    source_module="accelerate.accelerator",
    description="processes that share sequences read the same batches",
)

config.add_import(
    "veomni_hook.parallel.data",
    [
        *("count as veomni_data_count", "index as veomni_data_index", "mesh as veomni_data_mesh"),
        *("of_first as veomni_of_first", "once as veomni_once"),
    ],
)
config.rewrite(
    "Accelerator.prepare_data_loader",
    pattern="self.num_processes",
    replacement="veomni_data_count(self)",
    description="how many shares of the data there are",
)
config.rewrite(
    "Accelerator.prepare_data_loader",
    pattern="self.process_index",
    replacement="veomni_data_index(self)",
    description="which share this process reads",
)
config.rewrite(
    "Accelerator.prepare_data_loader",
    pattern="self._prepare_device_mesh()",
    replacement="veomni_data_mesh(self, self._prepare_device_mesh())",
    description="not by a mesh of all processes, which share sequences",
)
for pattern, replacement in (
    (
        "gather_object({data})",
        "gather_object(veomni_of_first({data}, self.gradient_state.active_dataloader))",
    ),
    ("self.gather({data})", "veomni_once(self.gather({data}), self.gradient_state.active_dataloader)"),
):
    config.rewrite(
        "Accelerator.gather_for_metrics",
        pattern=pattern,
        replacement=replacement,
        description="results of processes that share sequences are there once",
    )
