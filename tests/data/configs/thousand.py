"""An idiom for tests, the only one after `install()`: a scaling `forward` returns a thousand more."""

import types
from dataclasses import replace

from veomni_hook.patches.idioms import recognise
from veomni_hook.patches.routes.site import Site, Status
from veomni_hook.patches.routes.splice import before_body

OP = "scaling"
CANDIDATES = "a forward that uses scale"


def find(view):
    for owner, forward in view.forwards():
        if "scale" in view.text(forward):
            splices = before_body(view, forward, "if x:\n    return 1000 + self.scale * x", "a thousand more")
            yield Site(OP, f"{owner.name}.forward", Status.ROUTED, variant="times", splices=splices)


def fail(view):
    raise RuntimeError("a defect")


def garble(view):
    """What it writes is no Python."""
    for site in find(view):
        yield replace(site, splices=tuple(replace(one, text="\t(\n") for one in site.splices))


def install(find=find):
    module = types.SimpleNamespace(OP=OP, CANDIDATES=CANDIDATES, find=find, __name__="thousand")
    recognise.idioms = lambda: (module,)
