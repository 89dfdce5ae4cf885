"""Loops over layers: which may run on a part of the positions, and where parts are cut and joined."""
