"""Tell what is wrong with configs made for patchgen, which patchgen accepts in silence."""

from __future__ import annotations

from collections.abc import Iterable

from veomni_hook.errors import ConfigError
from veomni_hook.finders.log import warn_once
from veomni_hook.patches.report import Remark
from veomni_hook.settings import Settings

__all__ = ["tell_remarks"]


def tell_remarks(remarks: Iterable[Remark], settings: Settings) -> None:
    """Warn once per process about each remark on the patches of a module.

    Raises:
        ConfigError: there is one, in strict mode.
    """
    for remark in remarks:
        if settings.strict:
            raise ConfigError(remark.what, where=remark.where, fix=remark.fix)
        warn_once(str(remark))
