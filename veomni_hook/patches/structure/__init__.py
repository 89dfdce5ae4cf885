"""The structure of code: patterns, captures, fingerprints, names and their uses."""
