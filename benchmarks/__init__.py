"""Benchmarks: one script an op or a path, run as `python -m benchmarks.<name>` from the repository's root."""
