"""Checks that a batch has as many placeholder tokens as features."""
