"""Our kernels in VeOmni's kernel registry, and the hook's models in its model registry.

`register` offers the kernels, and the hook need not be active; `register_models` needs the hook.

VeOmni's generated modeling files ask an ``OpSlot`` for a kernel, and ``OpsImplementationConfig`` names the
one to bind. After `register`, the names ``veomni_hook_torch``, ``veomni_hook_triton`` and
``veomni_hook_npu`` are valid there. See docs/veomni.md for what each name computes and what is not offered.
"""

from veomni_hook.integrations.veomni.models import register_models
from veomni_hook.integrations.veomni.registration import OfferedKernel, Registration, register

__all__ = ["OfferedKernel", "Registration", "register", "register_models"]
