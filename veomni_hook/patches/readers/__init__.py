"""Code that is no one formula, read step by step: a loop over experts, the end of a forward, projections.

A reader says what code does, in terms that an idiom can compare. It knows no kernel, no slot and no site.
"""
