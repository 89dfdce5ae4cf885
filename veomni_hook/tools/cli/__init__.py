"""The command line `veomni-hook`: results on stdout, everything else on stderr.

A command is `<command>.py`, or `<command>/command.py` if it has several files. `inputs` and `sites` serve
several commands. The help and completion import every command, so that a command imports in its functions
what it needs only when it runs.
"""
