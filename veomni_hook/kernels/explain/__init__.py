"""What runs at every place of a model or a patched module that asks a slot, and why, as rows."""
