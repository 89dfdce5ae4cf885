"""The command line `veomni-hook`: one file per command; results on stdout, everything else on stderr."""
