"""Models split over the processes of a job: what patched code calls, and what plain training loops need.

The setting ``parallel`` (``VEOMNI_PARALLEL="sp=2"``) names the axes and their sizes. The public names are
resolved on first use, so importing this package imports no torch.
"""

from __future__ import annotations

from veomni_hook.on_use import imported_on_use

TYPE_CHECKING = False  # typing costs 5 ms to import; type checkers treat this name as true
if TYPE_CHECKING:
    from veomni_hook.parallel.expert_records import checkpoint as checkpoint
    from veomni_hook.parallel.expert_saving import load_optimizer as load_optimizer
    from veomni_hook.parallel.expert_saving import save_optimizer as save_optimizer
    from veomni_hook.parallel.gradient_norm import clip_grad_norm_ as clip_grad_norm_
    from veomni_hook.parallel.groups import data_shard as data_shard

_HOME = {
    "checkpoint": "veomni_hook.parallel.expert_records",
    "clip_grad_norm_": "veomni_hook.parallel.gradient_norm",
    "data_shard": "veomni_hook.parallel.groups",
    "load_optimizer": "veomni_hook.parallel.expert_saving",
    "save_optimizer": "veomni_hook.parallel.expert_saving",
}

__all__ = [*_HOME]
__getattr__, __dir__ = imported_on_use(globals(), _HOME)
