"""``python -m clamp bench``: the command, what makes its cases, against whom (peers), how (timing), and the report."""
