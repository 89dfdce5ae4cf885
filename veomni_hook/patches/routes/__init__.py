"""From an idiom's results to patched text. Nothing here depends on an op.

What idioms start from
    ``view``       a module, and the sites that other idioms find in it
    ``inherited``  what its classes inherit
    ``method``     a method that is searched for a run of statements

What makes the edits of the sites that they return (`veomni_hook.patches.site`)
    ``insertion``  statements, expressions, decorators
    ``takeover``   a guard that replaces a run of statements
    ``slot_code``  the code that asks a slot

What happens to sites then
    ``settle``     sites whose code the module replaces itself
    ``reliance``   the code that a route depends on
    ``config``     the built-in config of all routes
    ``compose``    their edits combined
"""
