"""From an idiom's results to patched text: sites, the guards that call a slot, and the config made of them.

Nothing here depends on an op.
"""
