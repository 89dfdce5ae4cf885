"""The line that says what is patched in a running model, once per process tree and only on rank 0.

It is printed when kernels are chosen, at the first call of a module: only then is the device known, and only
modules that a model really uses are named. A module with user patches only asks for no kernels, so its line
is printed when the module is imported.

Below the first line, a second one says if transformers or torch is newer than what was tested. With such a
transformers, one below each module's line names what is missed there.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from veomni_hook.finders.log import say
from veomni_hook.finders.settings_in_force import current_settings
from veomni_hook.finders.state import STATE
from veomni_hook.finders.targets import PREFIX
from veomni_hook.kernels.selection.process_choice import STATE as KERNELS
from veomni_hook.kernels.selection.select import excluded, select, system_of
from veomni_hook.releases import TESTED, newer_than_tested
from veomni_hook.settings import BANNER_SHOWN

__all__ = ["kernels_are_chosen", "memory_is_chosen", "module_is_patched"]

_OWN = "veomni_hook."
_ROUTE = "route"
#: Kinds that accompany patches and change no code of the module.
_SURROUNDINGS = frozenset(
    ("additional_import", "drop_import", "exclude", "helper", "post_import_block", "slot"),
)
#: Display names of backends in the line; others keep their own name.
_CALLED = {"triton": "Triton", "liger": "Liger", "npu": "torch_npu"}
_COMPILED, _UPSTREAM, _NONE = "torch.compile", "upstream's code", "no kernel"
#: The routes that ask for no kernel, and what the line calls them: done, and refused.
_WITHOUT_KERNEL = {
    "tiles": ("tiles", ""),
    "layer_loop": ("sequence parallelism", "no sequence parallelism"),
    "speech": ("without speech", "with speech"),
    "absent_modality": ("towers without data", ""),
    "host_metadata": ("sizes on the host", ""),
    "count_check": ("checks of counts", ""),
    "row_join": ("rows in order", ""),
    "sample_boundaries": ("boundaries of samples", ""),
    "pooled_windows": ("windows of samples", ""),
}
_LAST = (_COMPILED, _UPSTREAM, _NONE)
#: Variables in which launchers give a process's rank: torchrun, accelerate, DeepSpeed and Ray, Slurm, MPI.
_RANKS = (
    "RANK",
    "LOCAL_RANK",
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "PMIX_RANK",
    "MV2_COMM_WORLD_RANK",
)


def kernels_are_chosen(module: str, device: str | None, compiled: bool = False) -> None:  # noqa: FBT001, FBT002
    """Print the line for a module, unless it was already printed or is not wanted.

    Args:
        module: a patched module that calls one of its slots.
        device: the torch device type of the call. None if this slot has no kernel on any device; then the
            line waits for a slot that has one.
        compiled: whether ``torch.compile`` traces the call.
    """
    applied = _applied(module)
    if not applied or (device is None and any(_has_kernels(patch) for patch in applied)):
        return
    _say_once(module, [_what_runs(patch, device, compiled=compiled) for patch in applied])


def module_is_patched(module: str) -> None:
    """Print the line for a module that is being imported, if nothing in it asks for kernels."""
    applied = _applied(module)
    if applied and not any(patch["kind"] == _ROUTE for patch in applied):
        _say_once(module, [_what_runs(patch, None) for patch in applied])


def memory_is_chosen(line: str) -> None:
    """Print what was chosen for a budget of memory."""
    if current_settings().banner and _is_first_process():
        say(line)


def _applied(module: str) -> list[Mapping[str, Any]]:
    """The patches of a module that change its code: routes to kernels, and user patches."""
    outcome = STATE.outcomes.get(module)
    if module in STATE.announced or outcome is None or not outcome.patched:
        return []
    return [
        patch
        for patch in outcome.report.get("applied", ())
        if patch["kind"] == _ROUTE
        or (patch["kind"] not in _SURROUNDINGS and not patch["config"].startswith(_OWN))
    ]


def _say_once(module: str, places: list[str]) -> None:
    """Print the line once, given what runs at each place."""
    STATE.announced.add(module)
    if not current_settings().banner or not _is_first_process():
        return
    os.environ[BANNER_SHOWN] = str(os.getpid())
    counts = Counter(places)
    names = sorted(counts, key=lambda name: (name in _LAST, -counts[name], name))
    by_backend = ", ".join(f"{name}: {counts[name]}" for name in names)
    name = _short(module)
    details = f"veomni-hook explain {name}" if module.startswith(PREFIX) else "veomni_hook.explain(model)"
    number = "1 place" if len(places) == 1 else f"{len(places)} places"
    say(f"{name} patched at {number} ({by_backend}); details: {details}")
    loaded = {name: getattr(sys.modules.get(name), "__version__", "") for name in TESTED}
    if len(STATE.announced) == 1 and (newer := newer_than_tested(loaded)):
        say(newer)
    missed = STATE.outcomes[module].report.get("missed")
    if missed and newer_than_tested({"transformers": loaded["transformers"]}):
        sites = ", ".join(f"{site['op']} {site['target']}" for site in missed)
        say(f"{name} is not patched, though it looks like a kernel's code, at {sites}")


def _what_runs(patch: Mapping[str, Any], device: str | None, *, compiled: bool = False) -> str:
    """The backend that a route's slot asks first, or the config module of a user's patch."""
    if patch["kind"] != _ROUTE:
        return str(patch["config"]).partition(":")[0]
    if patch["op"] in _WITHOUT_KERNEL:
        done, refused = _WITHOUT_KERNEL[patch["op"]]
        return done if patch.get("variant") else refused
    if device is None:
        return _UPSTREAM
    variants = patch["variant"].split("|")
    backends = [_asked_first(patch["op"], variant, device, compiled=compiled) for variant in variants]
    # If a flag of the model chooses between formulas, the line shows the weakest backend of them.
    return max(backends, key=lambda name: _LAST.index(name) + 1 if name in _LAST else 0)


def _asked_first(op: str, variant: str, device: str, *, compiled: bool) -> str:
    selected = select(op, variant, KERNELS.effective, system_of(device))
    if selected.failure is not None:
        return _NONE
    if selected.kernel is None:
        return _UPSTREAM
    candidates = selected.compiled_in() if compiled else selected.candidates
    return _CALLED.get(candidates[0].backend, candidates[0].backend) if candidates else _COMPILED


def _has_kernels(patch: Mapping[str, Any]) -> bool:
    """Whether any device has a kernel for a route."""
    if patch["kind"] != _ROUTE or patch["op"] in _WITHOUT_KERNEL:
        return False
    variants = patch["variant"].split("|")
    return any(excluded(patch["op"], variant, KERNELS.effective) is None for variant in variants)


def _short(module: str) -> str:
    """The short name that the command line accepts for a module, or its full name."""
    if not module.startswith(PREFIX):
        return module
    family, _, leaf = module.removeprefix(PREFIX).rpartition(".")
    stem = leaf.removeprefix("modeling_")
    return family if stem == family else stem


def _is_first_process() -> bool:
    """Whether this process prints for its run: it is rank 0 and not a helper process."""
    if os.getpid() != STATE.process:  # forked: a worker of a data loader, for instance
        return False
    if os.environ.get(BANNER_SHOWN, str(os.getpid())) != str(os.getpid()):
        return False
    if any(os.environ.get(name, "").strip() not in ("", "0") for name in _RANKS):
        return False
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_rank() == 0)
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    is_child = multiprocessing is not None and multiprocessing.parent_process() is not None
    return not is_child or bool(os.environ.get("RANK"))
