"""Scaled."""
