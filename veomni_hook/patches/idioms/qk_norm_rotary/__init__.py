"""Attention that normalises queries and keys per head and then rotates them."""
