"""Features in the rows of placeholder tokens: merged, added or joined."""
