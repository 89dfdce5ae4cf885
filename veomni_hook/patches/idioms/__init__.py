"""Recognisers: each finds one op's code in any module by what it computes, and routes it to a kernel slot.

One file per op, with the name of the op's folder in `veomni_hook.kernels`; a folder where an op has several
idioms or much to read. There, ``find`` decides; ``read`` follows code that is more than one formula, step by
step; ``guard`` writes the guard where `veomni_hook.patches.routes` has no text for it. What idioms of several
ops need is there and in `veomni_hook.patches.code`. An idiom is a module with

* ``OP``: the op's name;
* ``WORDS``: all words of one alternative (``|``) are in each text in which it finds something; without words
  it may in any. Other idioms are not even imported, so this is read as text: one line, one string;
* ``SETTING``, if it applies only where this setting changes text;
* ``CANDIDATES``: a description of the code that counts as a candidate, so that misses are counted;
* ``find(view)``: every candidate of a module as a `veomni_hook.patches.site.Site`.

No idiom depends on a model's name or a release: idioms compare forms (`veomni_hook.patches.graph`) or
statements.
"""
