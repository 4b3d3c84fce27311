"""Tensor-level operations: netcl tensors in, netcl tensors out, no autograd, no casting rules.

Every function takes tensors stored as float32, float16 or bfloat16 in any mixture, computes in fp32, rounds once and
stores its result as ``out_dtype``. What holds for all of them stands here and not at each:

- ``grad`` is the gradient of the result, in its shape and any storage type (of a scalar loss, of one element);
- a dtype of a gradient that is None: it is not wanted;
- ``engine`` names one that takes the place of the choice (engine.py);
- what does not fit (shapes, an axis, an engine) raises ValueError before anything is launched, with what was passed.

What users may pass stands at the functions of ``clamp.functions``, which take netcl's places and call these.
"""
