"""``python -m clamp bench``: the command, what it times (cases/), against whom (peers), how (timing), the report."""
