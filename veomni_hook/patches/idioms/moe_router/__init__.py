"""Routers of experts."""
