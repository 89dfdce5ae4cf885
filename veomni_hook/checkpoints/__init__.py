"""Expert weights between checkpoints and models: converters, and checks of what was loaded.

transformers converts checkpoints in `from_pretrained` and `save_pretrained`, patched or not. The converters
are for streaming loaders outside of transformers; the patched `from_pretrained` runs the checks. Names are
resolved on first use: importing this package loads no torch, and code that only checks saves 12 ms.
"""

from __future__ import annotations

from veomni_hook.on_use import imported_on_use

TYPE_CHECKING = False
if TYPE_CHECKING:
    from veomni_hook.checkpoints.converter import TensorConverter as TensorConverter
    from veomni_hook.checkpoints.factories import from_any as from_any
    from veomni_hook.checkpoints.factories import from_fused as from_fused
    from veomni_hook.checkpoints.factories import from_fused_transposed as from_fused_transposed
    from veomni_hook.checkpoints.factories import from_per_expert as from_per_expert
    from veomni_hook.checkpoints.factories import to_fused as to_fused
    from veomni_hook.checkpoints.factories import to_fused_transposed as to_fused_transposed
    from veomni_hook.checkpoints.factories import to_per_expert as to_per_expert
    from veomni_hook.checkpoints.loaded import allow_incomplete_experts as allow_incomplete_experts
    from veomni_hook.checkpoints.loaded import check_loaded as check_loaded
    from veomni_hook.checkpoints.loaded import check_names as check_names
    from veomni_hook.checkpoints.sizes import ExpertSizes as ExpertSizes
    from veomni_hook.errors import CheckpointError as CheckpointError

_HOME = {
    "CheckpointError": "veomni_hook.errors",
    "ExpertSizes": "veomni_hook.checkpoints.sizes",
    "TensorConverter": "veomni_hook.checkpoints.converter",
    "allow_incomplete_experts": "veomni_hook.checkpoints.loaded",
    "check_loaded": "veomni_hook.checkpoints.loaded",
    "check_names": "veomni_hook.checkpoints.loaded",
    "from_any": "veomni_hook.checkpoints.factories",
    "from_fused": "veomni_hook.checkpoints.factories",
    "from_fused_transposed": "veomni_hook.checkpoints.factories",
    "from_per_expert": "veomni_hook.checkpoints.factories",
    "to_fused": "veomni_hook.checkpoints.factories",
    "to_fused_transposed": "veomni_hook.checkpoints.factories",
    "to_per_expert": "veomni_hook.checkpoints.factories",
}

__all__ = [*_HOME]
__getattr__, __dir__ = imported_on_use(globals(), _HOME)
