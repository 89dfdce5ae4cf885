"""Follow Python code once, for any kind of value.

`walk` goes through statements and expressions (assignments, branches, loops), and binds arguments of calls to
parameters. What values are is a `domain`: formulas (`veomni_hook.patches.graph.formula`), what is known of
positions, or the modules that ``__init__`` makes (`positions` and `modules` of
`veomni_hook.patches.idioms.layer_loop`).
"""
