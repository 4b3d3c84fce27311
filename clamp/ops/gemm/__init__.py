"""Matrix multiplication: `product` has the functions, `engines` the ways to compute them, one file each."""

from clamp.ops.gemm.product import PackedB, gemm, is_packed, pack_b, rounds_as_it_reads

__all__ = ["PackedB", "gemm", "is_packed", "pack_b", "rounds_as_it_reads"]
