"""HTML pages: what was patched, what runs there, and why; one file each, without scripts or anything to load.

`page` is the frame of every page, `html` makes markup and escapes text, `gather` and `live` collect what
`sections`, `diff` and `benchmarks` show. Nothing here imports torch or transformers.
"""
