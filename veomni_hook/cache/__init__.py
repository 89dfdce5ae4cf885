"""The cache of patched modules: keys, private files, leases. Bytes and files only; knows no ast, no torch."""
