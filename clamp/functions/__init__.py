"""An op's forward and backward, bound into netcl's autograd: one file a family, mirroring ``ops/``.

A function here takes netcl's arguments behind a ``Casting``, which decides what the kernels read and in which
dtype the result is stored (casting.py). ``OWNED`` maps the netcl functions that clamp replaces to them.
"""
