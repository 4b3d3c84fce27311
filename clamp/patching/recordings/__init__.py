"""Recorded steps: netcl's graphs and captures, what they depend on, and their replay."""
