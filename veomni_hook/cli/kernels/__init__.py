"""`veomni-hook kernels`: all kernels, or those of the places in models."""
