"""`veomni-hook run`, and what starts the user's command for `compare` too."""
