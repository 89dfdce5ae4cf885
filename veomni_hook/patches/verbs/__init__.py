"""One file per verb, or for some that are alike: each plans the edits that its patches need."""
