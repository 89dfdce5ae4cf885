"""The patch language: specs, structural edits, and the engine that applies them."""
