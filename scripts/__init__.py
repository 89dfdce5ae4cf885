"""Commands of this project's own; none of them travels in the wheel."""
