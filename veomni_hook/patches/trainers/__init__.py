"""Optional configs for trainers of other packages that compute log-probabilities themselves.

``VEOMNI_PATCHES=veomni_hook.patches.trainers.<name>`` enables one. All are off by default: such a trainer
needs no hook to keep its memory low. In a release that has another form, the import of its module is an error
that names what was not found.
"""
