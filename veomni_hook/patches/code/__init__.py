"""Reading and editing Python source. No file here knows an op, a config or a patch.

Text
    ``document``            a module's text and tree, by character offsets
    ``edit``                edits of text, where they go, their indentation, and the comments that mark them
    ``imports``             make imports absolute; where to add imports
    ``wrap``                long lines

Trees
    ``tree``                walk nodes fast; expressions, statements; copies with other code in some places
    ``statement_runs``      several statements as one expression

Names
    ``scope``               the names that code binds and uses, locally and as globals, and undefined ones
    ``calls``               where a function is called, and which module object is available there
    ``nearest_names``       the nearest names, for messages
    ``renames``             parameters that upstream renamed, as its decorators say

The same code
    ``comparison``          what "the same code" means: digests, and code with holes
    ``template``            statements with holes and choices, for idioms

Patterns and replacements of configs
    ``pattern``             code with holes, as a config writes it
    ``captures``            put what a pattern captured into a guard or a replacement
    ``snippet``             the source of functions and classes in configs, with renamed identifiers
"""
