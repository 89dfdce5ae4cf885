"""Hyper-connections: a residual of several streams."""
