"""The table of sites, every place that computes an op: `list` and `explain` show it."""
