"""Reading and editing Python source: documents, patterns, fingerprints, and edits by character offsets."""
