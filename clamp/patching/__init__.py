"""Putting clamp's functions over netcl's, and taking them off again.

``wrap.py`` turns one policy into one wrapper; ``engine.py`` holds what netcl's engine, writes and optimizers
need; ``patch.py`` installs it all and restores netcl to the identical objects.
"""
