"""HTML pages: what was patched, what runs there, and why; single files without scripts that load nothing.

`page` fills the templates (`templates/`) and escapes text; `gather` and `live` collect the data (`model`)
that `whole`, `diff` and `benchmarks` prepare for them. `explanation` is what `veomni_hook.explain` returns:
the same of a live model, as text, table or page. Nothing here imports torch or transformers.
"""
