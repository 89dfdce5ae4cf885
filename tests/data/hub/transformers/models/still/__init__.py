"""Still."""
