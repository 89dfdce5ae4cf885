"""`veomni-hook list`: families or modules, and what is routed to kernels there."""
