"""Recognisers: each finds one op's code in any module by what it computes, and routes it to a kernel slot.

An idiom is a module here with

* ``OP``: the op's name;
* ``CANDIDATES``: a description of the code that counts as a candidate, so that misses are counted;
* ``find(view)``: every candidate of a module as a `site.Site`.

No idiom depends on a model's name or a release: idioms compare forms (`veomni_hook.patches.graph`) or
statements.
"""
