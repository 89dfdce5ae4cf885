"""Data loaders that accelerate prepares: processes that share sequences read the same batches.

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
    ["count as veomni_data_count", "index as veomni_data_index", "mesh as veomni_data_mesh"],
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
