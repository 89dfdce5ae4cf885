"""Every exception and warning of the package: what failed, where, and what to do.

Each error stores these three parts as fields (``what``, ``where``, ``fix``) and prints them on separate
lines, so that reports can split them and no message can omit one.
"""

from __future__ import annotations

from collections.abc import Iterable

from veomni_hook.printable import printable

__all__ = [
    "AdoptionError",
    "AlreadyImportedError",
    "AlreadyImportedWarning",
    "CacheError",
    "CheckpointError",
    "ConfigError",
    "ExcludedNameError",
    "IdiomError",
    "InputError",
    "KernelError",
    "LockError",
    "MultimodalError",
    "NameMapError",
    "OffloadError",
    "ParallelError",
    "PatchConflictError",
    "PatchError",
    "PatchTargetError",
    "PredictionError",
    "ReplacementError",
    "RoutingError",
    "SamplesError",
    "SettingsError",
    "SignatureError",
    "SpeechError",
    "UnresolvedNameError",
    "VeomniHookError",
    "VeomniHookWarning",
]


class VeomniHookWarning(UserWarning):
    """Base of every warning that this package issues."""

    def __str__(self) -> str:
        return printable(super().__str__())


class AlreadyImportedWarning(VeomniHookWarning):
    """A module with known patches was imported before the hook was active."""


class VeomniHookError(Exception):
    """Base of every error: ``what`` failed, ``where``, and the ``fix``."""

    def __init__(self, what: str, *, where: str, fix: str) -> None:
        # `Exception.__new__` has kept `what`; torch 2.11 cannot trace a call of its `__init__`.
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        return printable(f"{self.what}\n  where: {self.where}\n  fix:   {self.fix}")

    def __reduce__(self) -> tuple[object, ...]:
        # Exception's own __reduce__ calls the class with positional args only; workers pickle errors.
        return type(self).__new__, (type(self), self.what), self.__dict__


class SamplesError(VeomniHookError, ValueError):
    """Samples that share a row cannot be kept apart, or their boundaries contradict the batch."""


class SettingsError(VeomniHookError):
    """A setting has an invalid value, or a settings file cannot be read."""


class ConfigError(VeomniHookError):
    """A patch config cannot be loaded, or is not a patch config.

    ``waits_for``: the module that the config needs and that is just being imported, if that is the cause.
    """

    waits_for = ""


class AlreadyImportedError(VeomniHookError):
    """Strict form of `AlreadyImportedWarning`."""


class AdoptionError(VeomniHookError):
    """No module of a loaded model can be patched, or its former classes cannot be restored."""


class CacheError(VeomniHookError):
    """A cache command failed; imports never raise this."""


class CheckpointError(VeomniHookError):
    """A checkpoint's expert tensors do not match the model; ``tensors`` names the wrong or missing ones."""

    def __init__(self, what: str, *, where: str, fix: str, tensors: Iterable[str] = ()) -> None:
        super().__init__(what, where=where, fix=fix)
        self.tensors = tuple(tensors)


class InputError(VeomniHookError, ValueError):
    """A processor was given inputs that exclude each other."""


class KernelError(VeomniHookError):
    """A requested kernel does not exist or cannot run; the message lists those that can."""


class MultimodalError(VeomniHookError):
    """A model has no metadata of the kind that was asked for."""


class LockError(VeomniHookError):
    """The lock of `veomni-hook check` cannot be read or written."""


class OffloadError(VeomniHookError):
    """What checkpointed layers keep cannot go to the host, or not come back as it was."""


class ParallelError(VeomniHookError, RuntimeError):
    """A model cannot be split over processes as the setting ``parallel`` asks."""


class PredictionError(VeomniHookError):
    """The memory of a training step cannot be predicted."""


class RoutingError(VeomniHookError, ValueError):
    """A router's choice cannot be recorded or counted, or routes do not fit the model or the batch."""


class SpeechError(VeomniHookError, ValueError):
    """A model that was built without its parts for speech was asked for speech."""


class PatchError(VeomniHookError):
    """Base of all errors in a patch; ``target`` is the patch's target."""

    def __init__(self, what: str, *, where: str, fix: str, target: str = "") -> None:
        super().__init__(what, where=where, fix=fix)
        self.target = target


class PatchTargetError(PatchError):
    """A declared patch does not apply exactly once; ``nearest`` holds the closest existing names."""

    def __init__(
        self, what: str, *, where: str, fix: str, target: str = "", nearest: Iterable[str] = ()
    ) -> None:
        super().__init__(what, where=where, fix=fix, target=target)
        self.nearest = tuple(nearest)


class PatchConflictError(PatchError):
    """Two patches change the same place, and neither names the other as its base."""


class IdiomError(PatchError):
    """A recogniser failed on a module, or its output is invalid: a bug in this package."""


class ReplacementError(PatchError):
    """The replacement code does not exist, or its source cannot be read."""


class SignatureError(PatchError):
    """A replacement drops parameters that callers use."""


class NameMapError(PatchError):
    """A ``name_map`` entry matches nothing in the replacement's source."""


class ExcludedNameError(PatchError):
    """A name excluded from the output is still used; ``uses`` lists every place."""

    def __init__(
        self, what: str, *, where: str, fix: str, target: str = "", uses: Iterable[str] = ()
    ) -> None:
        super().__init__(what, where=where, fix=fix, target=target)
        self.uses = tuple(uses)


class UnresolvedNameError(PatchError):
    """A patch's code uses names that the patched module does not provide; ``names`` lists them."""

    def __init__(
        self, what: str, *, where: str, fix: str, target: str = "", names: Iterable[str] = ()
    ) -> None:
        super().__init__(what, where=where, fix=fix, target=target)
        self.names = tuple(names)
