"""Matrix multiplication: `product` has the functions, `engines` the ways to compute them, one file each."""

from clamp.ops.gemm.product import PackedB, gemm, is_packed, pack_b

__all__ = ["PackedB", "gemm", "is_packed", "pack_b"]
