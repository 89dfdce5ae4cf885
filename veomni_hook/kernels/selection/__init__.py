"""Choosing a kernel: the registry, what the user wants, what the machine has, and what follows from them."""
