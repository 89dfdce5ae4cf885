"""The boundaries of samples that share a row, found by a model for its layers of linear attention."""
