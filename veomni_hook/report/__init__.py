"""HTML pages: what was patched, what runs there, and why; single files without scripts that load nothing.

`page` is the frame of every page, `html` creates markup and escapes text, `gather` and `live` collect the
data that `sections`, `diff` and `benchmarks` show. Nothing here imports torch or transformers.
"""
