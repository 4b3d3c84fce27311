"""A training run in one file."""
