import pytest

from veomni_hook.errors import IdiomError
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.routes.config import NAME, missed, routes
from veomni_hook.patches.site import Site, Status
from veomni_hook.patches.spec import PatchType, SlotSpec

SLOT = SlotSpec("veomni_o_v", "o", "v")
TEXT = (Edit(0, 0, "x\n"),)


def site(target="A.forward", status=Status.ROUTED, **fields):
    return Site("o", target, status, **{"variant": "v", "edits": TEXT, "slots": (SLOT,), **fields})


def test_every_routed_site_with_text_becomes_one_route():
    sites = [
        site(captures={"eps": "self.eps", "weight": "self.w"}),
        site("B.forward"),
        site("apply", edits=()),
        site("C.forward", Status.MISSED),
        site("D.forward", Status.UNBOUND),
    ]
    config = routes(sites, "pkg.a")
    assert config is not None
    assert config.applies_to("pkg.a") and config.name == config.origin == NAME
    assert [(p.patch_type, p.target, p.description, p.site) for p in config.patches] == [
        (PatchType.ROUTE, "A.forward", "o/v: eps=self.eps, weight=self.w", sites[0]),
        (PatchType.ROUTE, "B.forward", "o/v", sites[1]),
    ]
    assert config.slots == [SLOT]


def test_nothing_to_route_is_no_config():
    assert routes([], "pkg.a") is None
    assert routes([site(status=Status.MISSED), site(edits=())], "pkg.a") is None


def test_long_captures_are_cut():
    config = routes([site(captures={"x": "y" * 500})], "pkg.a")
    assert config is not None
    description = config.patches[0].description or ""
    assert len(description) < 130 and description.endswith("...")


def test_a_slot_has_one_meaning():
    other = SlotSpec("veomni_o_v", "o", "v", parameters="q, k")
    with pytest.raises(IdiomError, match=r"A\.forward.*B\.forward") as caught:
        routes([site(), site("B.forward", slots=(other,))], "pkg.a")
    assert caught.value.where == "pkg.a"


def test_what_is_not_routed_is_told_with_its_reason():
    found = missed([site(), site("B", Status.MISSED, reason="else"), site("C", Status.UNBOUND, reason="no")])
    assert [(one.target, one.status, one.reason) for one in found] == [
        ("B", "missed", "else"),
        ("C", "unbound", "no"),
    ]
