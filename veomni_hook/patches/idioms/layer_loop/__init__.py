"""Layer loops of base models: which work on a part of the positions, and where the parts are made and joined."""
