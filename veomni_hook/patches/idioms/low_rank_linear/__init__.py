"""Linear layers with low-rank adapters: found where a loop over a module's adapters adds their products."""
