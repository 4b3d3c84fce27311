"""Tensor-level operations: netcl tensors in, netcl tensors out, no autograd, no casting rules.

Every function takes tensors stored as float32, float16 or bfloat16 in any mixture, computes in fp32 and
stores its result as ``out_dtype``.
"""
