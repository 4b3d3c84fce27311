"""What of OpenCL the rest uses: programs, what a device can do, and what a recorded step must not do."""
