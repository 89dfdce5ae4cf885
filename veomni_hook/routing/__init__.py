"""Which experts the tokens of a mixture-of-experts model are sent to: recorded, replayed, counted.

`record` keeps what routers choose, `replay` lets them choose the same again, and `monitor` counts it. They
act where every recognised router asks for a kernel (`veomni_hook.kernels.moe_router.seam`), whichever backend
computes it, upstream's formula included. docs/routing.md describes them.
"""

from __future__ import annotations

from veomni_hook.routing.load import Load, monitor
from veomni_hook.routing.record import record
from veomni_hook.routing.replay import replay
from veomni_hook.routing.routes import Routes

__all__ = ["Load", "Routes", "monitor", "record", "replay"]
