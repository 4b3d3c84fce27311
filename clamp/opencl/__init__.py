"""OpenCL as the rest uses it: programs, what a device can do, and what a recorded step must not do."""
