"""Read code that is more than one formula, step by step: a loop over experts, the end of a forward.

A reader describes what code does in terms that an idiom can compare. It knows no kernels, slots or sites.
"""
