"""``python -m clamp bench``: the command (command.py) and its parts."""
