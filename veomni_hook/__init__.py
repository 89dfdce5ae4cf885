"""Hugging Face modeling code, patched in memory as it is imported.

A training script only needs `import veomni_hook.install`. The names below are for writing patches and for
inspection. Importing this package imports neither torch nor transformers: every name is resolved on first use
(PEP 562).
"""

from __future__ import annotations

from veomni_hook.on_use import imported_on_use

TYPE_CHECKING = False  # typing costs 5 ms to import; type checkers treat this name as true
if TYPE_CHECKING:
    from veomni_hook.adoption import Adoption as Adoption
    from veomni_hook.adoption import adopt as adopt
    from veomni_hook.errors import VeomniHookError as VeomniHookError
    from veomni_hook.errors import VeomniHookWarning as VeomniHookWarning
    from veomni_hook.finders.handle import Handle as Handle
    from veomni_hook.finders.handle import activate as activate
    from veomni_hook.finders.registration import register as register
    from veomni_hook.kernels.bind import bind as bind
    from veomni_hook.kernels.linear_cross_entropy.functional import (
        linear_cross_entropy as linear_cross_entropy,
    )
    from veomni_hook.kernels.linear_cross_entropy.functional import token_log_probs as token_log_probs
    from veomni_hook.kernels.linear_cross_entropy.objective import Teacher as Teacher
    from veomni_hook.kernels.linear_cross_entropy.options import loss_options as loss_options
    from veomni_hook.kernels.selection.binding import use_kernels as use_kernels
    from veomni_hook.kernels.selection.declaration import Kernel as Kernel
    from veomni_hook.kernels.selection.registry import register_kernel as register_kernel
    from veomni_hook.patches.mapped import use_mapped_classes as use_mapped_classes
    from veomni_hook.patches.spec import PatchConfig as PatchConfig
    from veomni_hook.patches.spec import create_patch_from_external as create_patch_from_external
    from veomni_hook.tools.generation.generate import generate as generate
    from veomni_hook.tools.report.explanation import explain as explain

__version__ = "0.1.0"

_HOME = {
    "Adoption": "veomni_hook.adoption",
    "Handle": "veomni_hook.finders.handle",
    "Kernel": "veomni_hook.kernels.selection.declaration",
    "PatchConfig": "veomni_hook.patches.spec",
    "Teacher": "veomni_hook.kernels.linear_cross_entropy.objective",
    "VeomniHookError": "veomni_hook.errors",
    "VeomniHookWarning": "veomni_hook.errors",
    "activate": "veomni_hook.finders.handle",
    "adopt": "veomni_hook.adoption",
    "bind": "veomni_hook.kernels.bind",
    "create_patch_from_external": "veomni_hook.patches.spec",
    "explain": "veomni_hook.tools.report.explanation",
    "generate": "veomni_hook.tools.generation.generate",
    "linear_cross_entropy": "veomni_hook.kernels.linear_cross_entropy.functional",
    "loss_options": "veomni_hook.kernels.linear_cross_entropy.options",
    "register": "veomni_hook.finders.registration",
    "register_kernel": "veomni_hook.kernels.selection.registry",
    "token_log_probs": "veomni_hook.kernels.linear_cross_entropy.functional",
    "use_kernels": "veomni_hook.kernels.selection.binding",
    "use_mapped_classes": "veomni_hook.patches.mapped",
}

__all__ = [*_HOME]
__getattr__, __dir__ = imported_on_use(globals(), _HOME)
