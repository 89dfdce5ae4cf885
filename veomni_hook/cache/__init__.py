"""The cache of patched modules: keys, private files, leases. Bytes and files only; no ast, no torch."""
