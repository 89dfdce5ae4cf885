"""What patched code calls where models have vision or audio towers."""
