"""Source text: documents with positions, edits, and helpers that read or insert code."""
