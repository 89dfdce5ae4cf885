"""What the integration needs of VeOmni, imported and checked before anything is registered.

VeOmni is imported by name, on first use: this package can be imported without it. Whatever is read or
extended is checked here, so that another release of VeOmni is a clear error and not a model with other
kernels.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from veomni_hook.errors import KernelError

__all__ = ["Veomni", "attribute", "gather"]

_WHERE = "veomni_hook.integrations.veomni"
_RELEASE = "0.1.12"


class Veomni(NamedTuple):
    """The objects of VeOmni that a registration uses.

    Attributes:
        registry: ``KERNEL_REGISTRY``, which slots are bound from.
        kernel_spec: the class of its entries.
        hardware: the class of their hardware requirements.
        backend_spec: the class of the backends of the older registry, ``OpSpec.backends``.
        backends: these dicts, by op.
        losses: the module with ``install_loss_mapping``.
        experts: the module with ``apply_veomni_fused_moe_patch``.
        allowed_on_npu: the names that ``OpsImplementationConfig`` accepts on an Ascend NPU, by field.
    """

    registry: Any
    kernel_spec: Any
    hardware: Any
    backend_spec: Any
    backends: dict[str, dict[str, Any]]
    losses: Any
    experts: Any
    allowed_on_npu: dict[str, frozenset[str]]


def attribute(module: str, name: str) -> Any:
    """Return what VeOmni's ``module`` calls ``name``.

    Raises:
        KernelError: VeOmni, or a package that it imports, is not installed, or it has no such name.
    """
    imported = _imported(module)
    if not hasattr(imported, name):
        raise _changed(f"{module} has no {name!r}")
    return getattr(imported, name)


def gather(slots: Iterable[tuple[str, str]], legacy_ops: tuple[str, ...]) -> Veomni:
    """Return the parts of VeOmni that a registration uses.

    Args:
        slots: the slots, ops and variants, that are offered a kernel.
        legacy_ops: ops of its older registry.

    Raises:
        KernelError: VeOmni cannot be imported, or one of the parts is not there or has another form.
    """
    _imported("veomni")
    # Importing the ops registers VeOmni's own kernels.
    _imported("veomni.ops")
    home, older = "veomni.ops.kernel_registry", "veomni.ops.config.registry"
    registry = attribute(home, "KERNEL_REGISTRY")
    for method in ("register", "resolve", "list_available"):
        if not callable(getattr(registry, method, None)):
            raise _changed(f"{home}.KERNEL_REGISTRY has no method {method!r}")
    for op, variant in slots:
        if not registry.list_available(op, variant):  # nothing would ever ask for ours
            raise _changed(f"its kernel registry has nothing for op {op!r}, variant {variant!r}")
    allowed = attribute("veomni.arguments.arguments_types", "_NPU_ALLOWED")
    if not isinstance(allowed, dict) or not all(isinstance(names, frozenset) for names in allowed.values()):
        raise _changed("veomni.arguments.arguments_types._NPU_ALLOWED is no dict of frozensets")
    losses, experts = (_imported(f"veomni.ops.kernels.{name}") for name in ("cross_entropy", "moe"))
    _check_parameters(losses, "install_loss_mapping", "impl")
    _check_parameters(losses, "ForCausalLMLoss", "cross_entropy_fn", "shift_labels", "ignore_index")
    _check_parameters(losses, "ForSequenceClassificationLoss", "cross_entropy_fn")
    _check_parameters(experts, "apply_veomni_fused_moe_patch", "fused_moe_kernel")
    attribute(experts.__name__, "_fused_moe_forward")
    spec = ("name", "op_name", "variant", "factory", "hardware", "description")
    return Veomni(
        registry=registry,
        kernel_spec=_checked_class(home, "KernelSpec", *spec),
        hardware=_checked_class(home, "HardwareRequirement", "device_type", "min_compute_capability"),
        backend_spec=_checked_class(older, "BackendSpec", "entry", "requires", "replace_forward"),
        backends={op: _backends_of(op, older) for op in legacy_ops},
        losses=losses,
        experts=experts,
        allowed_on_npu=allowed,
    )


def _backends_of(op: str, home: str) -> dict[str, Any]:
    try:
        backends = attribute(home, "get_op")(op).backends
    except (KeyError, AttributeError) as error:
        raise _changed(f"{home} has no backends for op {op!r}") from error
    if not isinstance(backends, dict):
        raise _changed(f"the backends of op {op!r} in {home} are no dict")
    return backends


def _checked_class(module: str, name: str, *needed: str) -> Any:
    class_ = attribute(module, name)
    known = {field.name for field in fields(class_)} if is_dataclass(class_) else set()
    if missing := [field_name for field_name in needed if field_name not in known]:
        raise _changed(f"{module}.{name} has no field {missing[0]!r}")
    return class_


def _check_parameters(module: Any, name: str, *needed: str) -> None:
    parameters = inspect.signature(attribute(module.__name__, name)).parameters
    if missing := [parameter for parameter in needed if parameter not in parameters]:
        raise _changed(f"{module.__name__}.{name} has no parameter {missing[0]!r}")


def _imported(module: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        name = error.name or module
        if name.startswith("veomni."):
            raise _changed(f"there is no module {name}") from error
        if name == "veomni":
            what, fix = "the package veomni is not installed", f"pip install --no-deps veomni=={_RELEASE}"
        else:
            what = f"{module} cannot be imported: it needs the package {name}, which is not installed"
            fix = f"install {name}"
        raise KernelError(what, where=_WHERE, fix=fix) from error
    except ImportError as error:
        raise KernelError(
            f"{module} cannot be imported: {error}",
            where=_WHERE,
            fix="install the releases of torch and transformers that this VeOmni was made for",
        ) from error


def _changed(what: str) -> KernelError:
    try:
        release = version("veomni")
    except PackageNotFoundError:
        release = "of an unknown release"
    return KernelError(
        f"veomni {release} is not the VeOmni that this integration knows: {what}",
        where=_WHERE,
        fix=f"install veomni=={_RELEASE}, which it was checked with, or a newer veomni-hook",
    )
