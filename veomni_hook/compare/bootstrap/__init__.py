"""A folder for PYTHONPATH: each Python that starts with it there observes its training."""
