"""`VEOMNI_DUMP_PATCHED=1`: write every patched module and its unified diff, one log line each."""

from __future__ import annotations

import os
from importlib.util import decode_source

from veomni_hook.finders import build, pipeline
from veomni_hook.finders import configs as config_loading
from veomni_hook.finders.log import say, warn
from veomni_hook.finders.state import STATE
from veomni_hook.patches.render import dump_text, unified_diff
from veomni_hook.settings import Settings


def dump(upstream: pipeline.Upstream, settings: Settings) -> str | None:
    """Write `<dump_dir>/<module path>.py` and `.diff`; returns the path, None when nothing applies.

    The module is patched afresh: a stored entry holds no diff, and a dump is asked for when something looks
    wrong, which is no time to trust a cache. A folder that cannot be written is a warning.
    """
    loaded = config_loading.load(pipeline.config_names(upstream.module, settings))
    every = config_loading.for_module(loaded, STATE.registered)
    patched, _ = build.patch_with_idioms(upstream, every, settings)
    if patched is None:
        return None
    stored = build.stored_form(patched)
    path = os.path.join(settings.dump_dir, *upstream.module.split(".")[1:]) + ".py"
    diff = unified_diff(decode_source(upstream.data), patched, upstream.module)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        for name, text in ((path, dump_text(stored.text, upstream.module)), (path[:-3] + ".diff", diff)):
            with open(name, "w", encoding="utf-8", newline="") as file:
                file.write(text)
    except OSError as error:
        warn(f"the patched source of {upstream.module} cannot be dumped to {settings.dump_dir}: {error}")
        return None
    say(f"dumped {upstream.module}: {path}, {path[:-3]}.diff")
    return path
