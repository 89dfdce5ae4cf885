"""Source text: documents with positions, edits, and what is read out of or put into them."""
