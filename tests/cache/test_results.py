"""The answers' own behaviour; what they are made from is tested with the store."""

from veomni_hook.cache.entry import Manifest
from veomni_hook.cache.store import Hit, Miss, NotStored, Unpatched

FIELDS = dict.fromkeys(("key", "distribution", "version", "patch_hash", "tag", "text_seal"), "")
MANIFEST = Manifest({**FIELDS, "module": "pkg.mod"}, {}, b'{"applied": []}')


def _hit():
    code = compile("", "/somewhere/mod.py", "exec")
    return Hit(MANIFEST, "/somewhere/mod.py", code, "größe\r\n".encode())


def test_report_is_parsed_anew_each_time():
    hit = _hit()
    hit.report["applied"].append("mine")
    assert hit.report == {"applied": []}


def test_source_is_decoded_and_not_normalised():
    assert _hit().source() == "größe\r\n"


def test_answers_print_what_they_say():
    assert repr(_hit()) == "Hit('pkg.mod', '/somewhere/mod.py')"
    assert repr(Unpatched(MANIFEST)) == "Unpatched('pkg.mod')"
    assert (repr(Miss("why")), repr(NotStored("why"))) == ("Miss('why')", "NotStored('why')")
    assert not isinstance(Miss("why"), NotStored)
