"""What patched code calls in models that take more than text."""
