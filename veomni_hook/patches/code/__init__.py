"""Reading and editing Python source. No file here knows an op, a config or a patch.

Text
    ``document``            a module's text and tree, by character offsets
    ``edit``                edits of text, and the comments that mark them: the only way to change code
    ``placement``           where statements can be inserted
    ``removal``             remove statements, or items of a list
    ``imports``             make imports absolute; where to add imports
    ``reindent``, ``wrap``  indentation; long lines

Trees
    ``walk``                visit nodes fast, as recognisers do
    ``statements``          blocks, and what statements bind
    ``expressions``         names in expressions, and expressions without side effects
    ``statement_runs``      several statements as one expression
    ``substitution``        copies with other code in place of some nodes

Names
    ``scope``               the names that code binds and uses, locally and as globals
    ``unresolved``          names that nothing defines
    ``redefinitions``       definitions that the module itself replaces later
    ``calls``               where a function is called, and which module object is available there
    ``nearest_names``       the nearest names, for messages
    ``renames``             parameters that upstream renamed, as its decorators say

Code with holes
    ``fingerprint``         what "the same code" means, and its digest
    ``matching``            compares code with holes with code, by structure
    ``template``            statements with holes and choices, for idioms

Patterns and replacements of configs
    ``pattern``             code with holes, as a config writes it
    ``captures``            put what a pattern captured into a guard or a replacement
    ``snippet``             the source of functions and classes in configs
    ``name_map``            rename identifiers in them
"""
