"""From an idiom's results to patched text. Nothing here depends on an op.

``view``             what idioms start from: a module, what its classes inherit, the sites of other idioms;
                     also the sites whose code the module replaces itself
``cache_parameter``  which parameter of a forward is its cache
``guards``           the edits of the sites that they return (`veomni_hook.patches.site`)
``config``           the built-in config of all routes, and the code that a route depends on
``compose``          their edits combined
"""
