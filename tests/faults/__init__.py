"""Trainings of a few steps in which one call into OpenCL fails, or which one Ctrl-C interrupts, anywhere.

After it the weights are as before the step, or as after it; the step can be made again, and the training ends with the
bits of one that nothing has disturbed; ``amp.shutdown()`` gives back the identical objects, however far ``init`` or an
earlier ``shutdown`` has come. ``python -m tests.faults`` tries each call, ``test_faults.py`` a sample.
"""
