"""A table."""

BONUS = 7
