"""`import veomni_hook.install`: activate the hook with the settings of this process.

`handle` undoes it (`veomni_hook.install.handle.deactivate()`) and tells what happened (`handle.status()`).
"""

from __future__ import annotations

from veomni_hook.finders.handle import activate

handle = activate()
