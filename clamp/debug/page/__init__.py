"""The page of a run, and its JSON."""
