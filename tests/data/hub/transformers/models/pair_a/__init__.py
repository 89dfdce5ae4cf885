"""Imports its partner, which imports it."""
