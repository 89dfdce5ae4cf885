"""One file per verb: each plans the edits that its patches need."""
