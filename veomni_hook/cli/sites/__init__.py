"""The table of sites, every place that computes an op: `coverage`, `kernels`, `list`, `explain` show it."""
