"""Follow Python code once, for any kind of value.

`walk` goes through statements and expressions: assignments, branches, loops. What values are is a `domain`:
formulas (`veomni_hook.patches.graph.formula`) or what is known of positions
(`veomni_hook.patches.idioms.layer_loop.positions`). `functions` binds the arguments of calls to parameters.
"""
