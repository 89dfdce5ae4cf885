"""Calls of torch's convolutions whose stride is their kernel: the blocks that they read are disjoint."""
