"""OpenCL C sources of clamp, read with importlib.resources by clamp.opencl.program."""
