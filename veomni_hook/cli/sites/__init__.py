"""The table of sites, every place that computes an op: `coverage`, `kernels`, `list` and `explain` show it."""
