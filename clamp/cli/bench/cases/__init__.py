"""What ``bench`` times: a file for each kind of work, each of which yields its cases (contenders.py)."""
