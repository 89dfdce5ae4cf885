"""Upstream's mistakes, mended in the releases that have them, for who asks.

``VEOMNI_PATCHES=veomni_hook.patches.fixes.<name>`` switches one on. Nothing here is on by itself: a patched
model computes what the installed transformers computes. A fix names the bodies that it was written for by
their fingerprints; in a release without them it applies nowhere, and ``veomni-hook check`` says so.
"""
