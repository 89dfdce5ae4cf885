"""One file a verb: each plans the edits that its patches need."""
