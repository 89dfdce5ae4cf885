"""What configs made for patchgen need before a module that they patch is executed.

What is wrong with them is told. The modules that their code imports are imported first, as while configs are
loaded: VeOmni's runtime imports the modeling modules themselves, to derive output classes from theirs. Those
are served unpatched and forgotten; an import in the middle of the patched module would be circular.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

from veomni_hook.errors import ConfigError
from veomni_hook.finders.configs import serving_upstream
from veomni_hook.finders.log import warn_once
from veomni_hook.patches.report import Remark
from veomni_hook.settings import Settings

__all__ = ["prepare_execution"]


def prepare_execution(report: Mapping[str, Any], settings: Settings) -> None:
    """Tell the remarks of a report, once per process, and import the companions of the module.

    Raises:
        ConfigError: there is a remark, in strict mode.
        ImportError: a companion cannot be imported; the module could not be either.
    """
    for remark in (Remark(**each) for each in report["remarks"]):
        if settings.strict:
            raise ConfigError(remark.what, where=remark.where, fix=remark.fix)
        warn_once(str(remark))
    missing = [name for name in report["companions"] if name not in sys.modules]
    if missing:
        with serving_upstream():
            for name in missing:
                importlib.import_module(name)
