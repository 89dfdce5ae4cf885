"""Scores by which sparse attention selects the keys of each query."""
