"""`import veomni_hook.install`: activate the hook with the settings of this process.

`handle.deactivate()` undoes it, and `handle.status()` reports what happened (`veomni_hook.install.handle`).
"""

from __future__ import annotations

from veomni_hook.finders.handle import activate

handle = activate()
