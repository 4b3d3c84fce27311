"""Recorded steps: a user's function, netcl's graphs and captures; what they depend on, and their replay.

Importing any of it has wrappers registered for netcl's ``KernelCapture``, ``CompiledGraph`` and ``ForwardCompiler``.
"""

from clamp.recordings import capture, compiled, replay  # noqa: F401  (for what they meet)
