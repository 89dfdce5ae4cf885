"""Recognisers: each finds one op's code in any module by what it computes, and routes it to a kernel slot.

An idiom is a module here with

* ``OP``: the op's name;
* ``CANDIDATES``: in words, which code counts as a candidate, so that a miss is counted;
* ``find(view)``: every candidate of a module as a `site.Site`.

No idiom knows a model's name or a release: it compares forms (`veomni_hook.patches.graph`) or statements.
"""
