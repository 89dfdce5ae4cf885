"""Optional fixes for upstream bugs, for the releases that have them.

``VEOMNI_PATCHES=veomni_hook.patches.fixes.<name>`` enables one. All are off by default: a patched model
computes what the installed transformers computes. A fix lists the fingerprints of the bodies that it was
written for; in a release without them it does not apply, and ``veomni-hook check`` says so.
"""
