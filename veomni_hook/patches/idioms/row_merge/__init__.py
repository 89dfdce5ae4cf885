"""Features in the rows of placeholder tokens: merged, added, joined, and their numbers checked."""
