"""Matches the name of a target; nothing patches it."""
