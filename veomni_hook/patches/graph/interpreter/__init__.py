"""Execute code symbolically: names have nodes as values, and what a function returns is its graph."""
