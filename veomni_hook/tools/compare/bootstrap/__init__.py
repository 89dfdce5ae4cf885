"""A folder for PYTHONPATH: every Python process that starts with it records its training."""
