"""From what an idiom finds to patched text: sites, the guards that ask a slot, and the config they become.

Nothing here knows an op.
"""
