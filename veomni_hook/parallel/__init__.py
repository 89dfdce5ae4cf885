"""Sequence and expert parallelism."""
