"""The command line `veomni-hook`: one file a command; results on stdout, everything else on stderr."""
