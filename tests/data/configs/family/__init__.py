"""A package as VeOmni lays it out: a config, what its code imports, and (not here) `generated/` beside both."""
