"""Our kernels in VeOmni's kernel registry: `register` offers them, and the hook need not be active.

VeOmni's generated modeling files ask an ``OpSlot`` for a kernel, and ``OpsImplementationConfig`` names the
one to bind. After `register`, the names ``veomni_hook_torch``, ``veomni_hook_triton`` and
``veomni_hook_npu`` are valid there. See docs/veomni.md for what each name computes and what is not offered.
"""

from veomni_hook.integrations.veomni.registration import OfferedKernel, Registration, register

__all__ = ["OfferedKernel", "Registration", "register"]
