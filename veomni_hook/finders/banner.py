"""The line that says what is patched in a model that runs, once a process tree and on rank 0 alone.

It comes when kernels are chosen, at the first call of a module: only then the device is known, and only
modules of which a model is built and used are named. Where a user's patches are all that a module has,
nothing of it asks for kernels, and the line comes when the module is imported.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from veomni_hook.finders.finder import PREFIX
from veomni_hook.finders.handle import current_settings
from veomni_hook.finders.log import say
from veomni_hook.finders.state import STATE
from veomni_hook.settings import BANNER_SHOWN

__all__ = ["kernels_are_chosen", "module_is_patched"]

_OWN = "veomni_hook."
_ROUTE = "route"
#: What surrounds patches and changes no code of the module's.
_SURROUNDINGS = frozenset(
    ("additional_import", "drop_import", "exclude", "helper", "post_import_block", "slot"),
)
#: How backends are called in the line; others have their own name.
_CALLED = {"triton": "Triton", "liger": "Liger", "npu": "torch_npu"}
_COMPILED, _UPSTREAM, _NONE = "torch.compile", "upstream's code", "no kernel"
_LAST = (_COMPILED, _UPSTREAM, _NONE)
#: Where launchers say which rank a process has: torchrun, accelerate, DeepSpeed and Ray, Slurm, MPI.
_RANKS = (
    "RANK",
    "LOCAL_RANK",
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "PMIX_RANK",
    "MV2_COMM_WORLD_RANK",
)


def kernels_are_chosen(module: str, device: str | None, *, compiled: bool = False) -> None:
    """Print the line for a module, unless that is done or not wanted.

    Args:
        module: a patched module, one of whose slots is asked.
        device: the torch device type that it is asked for; None where this slot has no kernel on any, and the
            line waits for the call of another slot, if there is one that has.
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


def _applied(module: str) -> list[Mapping[str, Any]]:
    """The patches of a module that change its code: routes to kernels, and those of users."""
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
    """Print the line, given what runs at each place."""
    STATE.announced.add(module)
    if not current_settings().banner or not _is_first_process():
        return
    os.environ[BANNER_SHOWN] = str(os.getpid())
    counts = Counter(places)
    names = sorted(counts, key=lambda name: (name in _LAST, -counts[name], name))
    each = ", ".join(f"{name}: {counts[name]}" for name in names)
    name = _short(module)
    details = f"veomni-hook explain {name}" if module.startswith(PREFIX) else "veomni_hook.explain(model)"
    number = "1 place" if len(places) == 1 else f"{len(places)} places"
    say(f"{name} patched at {number} ({each}); details: {details}")


def _what_runs(patch: Mapping[str, Any], device: str | None, *, compiled: bool = False) -> str:
    """What a route's slot asks first, or the config module of a user's patch."""
    if patch["kind"] != _ROUTE:
        return str(patch["config"]).partition(":")[0]
    if device is None:
        return _UPSTREAM
    found = [_asked_first(patch["op"], one, device, compiled=compiled) for one in patch["variant"].split("|")]
    # Where a flag of the model chooses between formulas, the line promises the least of them.
    return max(found, key=lambda name: _LAST.index(name) + 1 if name in _LAST else 0)


def _asked_first(op: str, variant: str, device: str, *, compiled: bool) -> str:
    from veomni_hook.kernels.select import select, system_of
    from veomni_hook.kernels.state import STATE as KERNELS

    selected = select(op, variant, KERNELS.effective, system_of(device))
    if selected.failure is not None:
        return _NONE
    if selected.kernel is None:
        return _UPSTREAM
    candidates = selected.compiled_in if compiled else selected.candidates
    return _CALLED.get(candidates[0].backend, candidates[0].backend) if candidates else _COMPILED


def _has_kernels(patch: Mapping[str, Any]) -> bool:
    """Whether a kernel comes into question at a route, on any device."""
    from veomni_hook.kernels.select import excluded
    from veomni_hook.kernels.state import STATE as KERNELS

    if patch["kind"] != _ROUTE:
        return False
    return any(excluded(patch["op"], one, KERNELS.effective) is None for one in patch["variant"].split("|"))


def _short(module: str) -> str:
    """The name that the command line takes for a module, shorter than its own where there is one."""
    if not module.startswith(PREFIX):
        return module
    family, _, leaf = module.removeprefix(PREFIX).rpartition(".")
    stem = leaf.removeprefix("modeling_")
    return family if stem == family else stem


def _is_first_process() -> bool:
    """Whether this process speaks for its run: rank 0, and no helper of a process that does."""
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
