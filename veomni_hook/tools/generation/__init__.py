"""Files made of patched modules: `generate`, and what `dump` and `check --generated` write and compare."""
