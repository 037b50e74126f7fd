"""Several processes on one database: which one leads, who is there, and what one that only trains does without."""
