"""`register`: which of our kernels VeOmni gets under which name, and what changes in VeOmni for that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NamedTuple

from veomni_hook.errors import KernelError
from veomni_hook.integrations.veomni import adapters, losses
from veomni_hook.integrations.veomni.adapters import LEGACY, entry
from veomni_hook.integrations.veomni.backend import BACKENDS, Backend, kernel_of, name_of
from veomni_hook.integrations.veomni.upstream import Veomni, attribute, gather
from veomni_hook.layout import table

__all__ = ["OfferedKernel", "Registration", "register"]


class _Offer(NamedTuple):
    """A slot of VeOmni, our op and variant, and what makes the function of a backend; None: a `Backend`."""

    slot: tuple[str, str]
    ours: tuple[str, str]
    adapter: Callable[[str], Any] | None = None

    @property
    def field(self) -> str:
        """The field of ``OpsImplementationConfig`` that chooses the kernel."""
        op = self.slot[0]
        return "moe_implementation" if op == "moe_experts" else f"{op}_implementation"


_LOSS = ("linear_cross_entropy", "next_token")
_OFFERS = (
    _Offer(("rms_norm", "standard"), ("rms_norm", "cast_before_weight")),
    _Offer(("rms_norm", "qwen3_5"), ("rms_norm", "one_plus_weight")),
    _Offer(
        ("rms_norm", "unweighted"), ("rms_norm", "unweighted_rounded_scale"), adapters.unweighted_rms_norm
    ),
    _Offer(("rms_norm_gated", "standard"), ("rms_norm", "cast_before_weight_gated"), adapters.gated_rms_norm),
    _Offer(("rotary_pos_emb", "full"), ("rotary", "half_split"), partial(adapters.rotary, "half_split")),
    _Offer(
        ("rotary_pos_emb", "partial"),
        ("rotary", "half_split_partial"),
        partial(adapters.rotary, "half_split_partial"),
    ),
    _Offer(("rotary_pos_emb_vision", "full"), ("rotary", "half_split_fp32"), adapters.vision_rotary),
    _Offer(("swiglu_mlp", "standard"), ("gated_mlp", "product"), adapters.swiglu_mlp),
    _Offer(("moe_experts", "standard"), ("moe_experts", "gated"), adapters.experts),
    _Offer(
        ("moe_experts", "gpt_oss"), ("moe_experts", "biased_interleaved_alpha_gated"), adapters.biased_experts
    ),
    _Offer(
        ("load_balancing_loss", "standard"),
        ("load_balancing_loss", "softmax_topk"),
        adapters.load_balancing_loss,
    ),
    _Offer(("cross_entropy_loss", "causal"), _LOSS, losses.causal_lm_loss),
    _Offer(("cross_entropy_loss", "seq_cls"), _LOSS, losses.sequence_classification_loss),
)

#: VeOmni's words for torch's device types.
_DEVICES = {"cuda": "gpu", "npu": "npu"}
#: Packages whose presence VeOmni's older registry checks, by backend.
_REQUIRES = {"torch": (), "triton": ("triton",), "npu": ("torch_npu",)}
#: On the functions that stand in for VeOmni's own.
_MARK = "_veomni_hook_offers"


@dataclass(frozen=True)
class OfferedKernel:
    """A kernel of ours in VeOmni's registry.

    Attributes:
        op: VeOmni's op.
        variant: VeOmni's variant of it.
        name: its name in ``OpsImplementationConfig``.
        field: the field that takes this name.
        kernel: our op and variant, ``op/variant``.
        device: where it runs, in VeOmni's words: ``any``, ``gpu`` or ``npu``.
    """

    op: str
    variant: str
    name: str
    field: str
    kernel: str
    device: str


@dataclass(frozen=True, repr=False)
class Registration:
    """What `register` offers.

    Attributes:
        kernels: the kernels in VeOmni's registry, whether this call or an earlier one put them there.
        changed: what stands in for, or extends, objects of VeOmni outside that registry.
    """

    kernels: tuple[OfferedKernel, ...]
    changed: tuple[str, ...]

    def __repr__(self) -> str:
        names = dict.fromkeys(kernel.name for kernel in self.kernels)
        rows = dict.fromkeys(
            (kernel.field, f"{kernel.op}/{kernel.variant}", kernel.kernel) for kernel in self.kernels
        )
        lines = [
            f"registered in VeOmni: {', '.join(names)}",
            *(line.text for line in table(("field of OpsImplementationConfig", "slot", "kernel"), rows)),
            "changed in VeOmni:",
            *(f"  {change}" for change in self.changed),
        ]
        return "\n".join(lines)


def register(*backends: str) -> Registration:
    """Offer our kernels to VeOmni by names that ``OpsImplementationConfig`` takes, with or without the hook.

    Call it before the configuration is parsed and before a model is built. It imports VeOmni. Registering
    again adds nothing twice.

    VeOmni reads most choices from its kernel registry, which is extended by its own method. Four other
    places have a fixed list of names and no method that extends it. `register` changes these, after a
    check that they have the form that it knows:

    - ``veomni.ops.kernels.cross_entropy.install_loss_mapping`` is replaced by a function that knows our
      names and passes others on.
    - ``veomni.ops.kernels.moe.apply_veomni_fused_moe_patch``, likewise.
    - ``OpSpec.backends`` of the ops ``rms_norm`` (for models that VeOmni patches when it loads them) and
      ``load_balancing_loss`` gets our names.
    - ``veomni.arguments.arguments_types._NPU_ALLOWED`` gets those that run on an Ascend NPU.

    Args:
        *backends: ``torch`` (any device), ``triton`` (NVIDIA GPUs from compute capability 8.0), ``npu``
            (Ascend); none: all three. The name in VeOmni is ``veomni_hook_`` and the backend.

    Returns:
        What is offered; its ``repr`` is a table.

    Raises:
        KernelError: a backend does not exist; VeOmni or a package that it imports is not installed; or this
            release of VeOmni has another form. In each case nothing is registered.
    """
    if unknown := [backend for backend in backends if backend not in BACKENDS]:
        raise KernelError(
            f"there is no backend {unknown[0]!r} to offer to VeOmni",
            where="veomni_hook.integrations.veomni.register",
            fix=f"backends: {', '.join(BACKENDS)}",
        )
    wanted = tuple(backend for backend in BACKENDS if backend in backends or not backends)
    veomni = gather([offer.slot for offer in _OFFERS], tuple(LEGACY))
    offered = tuple(_offer(veomni, offer, backend) for offer in _OFFERS for backend in wanted)
    return Registration(offered, (*_extend_lists(veomni, wanted), *_stand_in(veomni)))


def _offer(veomni: Veomni, offer: _Offer, backend: str) -> OfferedKernel:
    """Put one kernel into VeOmni's registry, unless it is there."""
    (op, variant), name, kernel = offer.slot, name_of(backend), kernel_of(*offer.ours, backend)
    devices = kernel.requires.devices
    # VeOmni has no word for a CPU. Binding checks that the machine has one of several devices (`unmet`).
    device = _DEVICES[devices[0]] if len(devices) == 1 else "any"

    # A plain function: VeOmni reads the __code__ of a factory that replaces another.
    def factory() -> Any:
        return Backend(*offer.ours, backend) if offer.adapter is None else offer.adapter(backend)

    if name not in veomni.registry.list_available(op, variant):
        capability = kernel.requires.min_capability
        least = None if capability is None else capability[0] * 10 + capability[1]
        veomni.registry.register(
            veomni.kernel_spec(
                name=name,
                op_name=op,
                variant=variant,
                factory=factory,
                hardware=veomni.hardware(device_type=device, min_compute_capability=least),
                description=f"veomni_hook {'/'.join(offer.ours)}, {backend}: {kernel.description}",
            )
        )
    return OfferedKernel(op, variant, name, offer.field, "/".join(offer.ours), device)


def _extend_lists(veomni: Veomni, backends: tuple[str, ...]) -> list[str]:
    """Extend the lists of names that VeOmni keeps outside its kernel registry; return which."""
    for op, (_, is_forward) in LEGACY.items():
        for backend in backends:
            spec = veomni.backend_spec(
                entry=entry(op, backend), requires=_REQUIRES[backend], replace_forward=is_forward
            )
            veomni.backends[op].setdefault(name_of(backend), spec)
    for offer in _OFFERS:
        kernels = [kernel_of(*offer.ours, backend) for backend in backends]
        able = {name_of(kernel.backend) for kernel in kernels if not {*kernel.requires.devices} - {"npu"}}
        if offer.field in veomni.allowed_on_npu:  # VeOmni checks the other fields when it binds slots
            veomni.allowed_on_npu[offer.field] |= able
    lists = [f"get_op({op!r}).backends in veomni.ops.config.registry" for op in LEGACY]
    return [*lists, "veomni.arguments.arguments_types._NPU_ALLOWED"]


def _stand_in(veomni: Veomni) -> list[str]:
    """Replace VeOmni's two functions that raise for names they do not know; return which."""
    replaced = []
    for module, name, make in (
        (veomni.losses, "install_loss_mapping", partial(_loss_installer, veomni.registry)),
        (veomni.experts, "apply_veomni_fused_moe_patch", partial(_experts_installer, veomni.experts)),
    ):
        original = getattr(module, name)
        if not hasattr(original, _MARK):
            replacement = make(original)
            setattr(replacement, _MARK, True)
            setattr(module, name, replacement)
        replaced.append(f"{module.__name__}.{name}")
    return replaced


def _loss_installer(registry: Any, original: Callable[..., str]) -> Callable[..., str]:
    @wraps(original)
    def install_loss_mapping(impl: str = "eager") -> str:
        if impl not in map(name_of, BACKENDS):
            return original(impl)
        # By the registry, which checks the hardware.
        causal = registry.resolve("cross_entropy_loss", "causal", impl)
        by_sequence = registry.resolve("cross_entropy_loss", "seq_cls", impl)
        mapping = attribute("transformers.loss.loss_utils", "LOSS_MAPPING")
        mapping["ForCausalLM"] = mapping["ForConditionalGeneration"] = causal
        mapping["ForSequenceClassification"] = by_sequence
        return f"CrossEntropy ({impl})"

    return install_loss_mapping


def _experts_installer(experts: Any, original: Callable[..., None]) -> Callable[..., None]:
    backend_of = {name_of(backend): backend for backend in BACKENDS}

    @wraps(original)
    def apply_veomni_fused_moe_patch(fused_moe_kernel: str = "triton") -> None:
        if fused_moe_kernel not in backend_of:
            original(fused_moe_kernel)
            return
        experts._fused_moe_forward = adapters.fused_experts(backend_of[fused_moe_kernel])
        # Clears the kernels for LoRA of experts, which then run VeOmni's eager code.
        attribute("veomni.lora.ops", "bind_lora_moe_kernels")(fused_moe_kernel)

    return apply_veomni_fused_moe_patch
