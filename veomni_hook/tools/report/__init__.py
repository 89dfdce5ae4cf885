"""HTML pages: what was patched, what runs there, and why; single files without scripts that load nothing.

`page` is the frame of every page, `html` creates markup and escapes text, `gather` and `live` collect the
data that `sections`, `diff` and `benchmarks` show. `explanation` is what `veomni_hook.explain` returns: the
same of a live model, as text, table or page. Nothing here imports torch or transformers.
"""
