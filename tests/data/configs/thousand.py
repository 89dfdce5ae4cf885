"""An idiom for tests, the only one after `install()`: a scaling `forward` returns a thousand more."""

import types
from dataclasses import replace

from veomni_hook.patches.idioms import recognise
from veomni_hook.patches.site import Site, Status
from veomni_hook.patches.routes.guards import before_body

OP = "scaling"
CANDIDATES = "a forward that uses scale"


def find(view):
    for owner, forward in view.forwards():
        if "scale" in view.text(forward):
            edits = before_body(view, forward, "if x:\n    return 1000 + self.scale * x", "a thousand more")
            yield Site(OP, f"{owner.name}.forward", Status.ROUTED, variant="times", edits=edits)


def fail(view):
    raise RuntimeError("a defect")


def garble(view):
    """What it writes is no Python."""
    for site in find(view):
        yield replace(site, edits=tuple(replace(one, text="\t(\n") for one in site.edits))


def install(find=find):
    module = types.SimpleNamespace(OP=OP, CANDIDATES=CANDIDATES, find=find, __name__="thousand")
    recognise.idioms = lambda *_: (module,)
