"""The answers' own behaviour; what they are made from is tested with the store."""

from veomni_hook.cache.results import Hit, Miss, NotStored, Unpatched


def _hit():
    return Hit(
        module="pkg.mod", distribution="pkg", version="1", patch_hash="h", path="/somewhere/mod.py",
        code=compile("", "/somewhere/mod.py", "exec"), text="größe\r\n".encode(), report=b'{"applied": []}',
    )  # fmt: skip


def test_report_is_parsed_anew_each_time():
    hit = _hit()
    hit.report["applied"].append("mine")
    assert hit.report == {"applied": []}


def test_source_is_decoded_and_not_normalised():
    assert _hit().source() == "größe\r\n"


def test_answers_print_what_they_say():
    assert repr(_hit()) == "Hit('pkg.mod', '/somewhere/mod.py')"
    assert repr(Unpatched("pkg.mod")) == "Unpatched('pkg.mod')"
    assert (repr(Miss("why")), repr(NotStored("why"))) == ("Miss('why')", "NotStored('why')")
    assert not isinstance(Miss("why"), NotStored)
