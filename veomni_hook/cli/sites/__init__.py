"""The table of sites, the places that compute ops: `coverage`, `kernels`, `list` and `explain` show it."""
