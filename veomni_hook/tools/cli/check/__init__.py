"""`veomni-hook check`: patches against the installed or another release, and the lock."""
