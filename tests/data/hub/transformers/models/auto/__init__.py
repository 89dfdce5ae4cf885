"""Auto classes."""
