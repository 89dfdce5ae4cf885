"""The parts of a model that make speech."""
