"""`veomni-hook cache`: the command, and the step that compiles kernels ahead."""
