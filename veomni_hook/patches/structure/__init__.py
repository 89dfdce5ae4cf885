"""Code by structure: patterns, captures, fingerprints, names and where they are used."""
