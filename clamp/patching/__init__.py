"""Putting clamp's functions over netcl's, and taking them off again.

``wrap.py`` turns one policy into one wrapper; wrappers of what no list names say above them what they meet
(``patch_registry.py``); ``patch.py`` installs it all, and ``redirect.py`` restores netcl to the identical objects.
Beside ``clamp.bridge`` this is the only room that imports netcl and touches its private parts.
"""
