"""Memory of a training step: what it will take."""
