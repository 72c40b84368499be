"""Compressed collectives of sharded models."""

from gradcomp._src.parallel.collectives import (
  all_gather,
  all_to_all,
  ppermute,
  psum,
  psum_scatter,
  sum_gradients,
)
from gradcomp._src.parallel.gather import gather, gather_matmul, gather_residual
from gradcomp._src.parallel.reshard import reshard
from gradcomp._src.parallel.scan import compress_in_scan, scan
from gradcomp._src.parallel.zero.transform import zero

__all__ = ["all_gather", "all_to_all", "compress_in_scan", "gather", "gather_matmul"]
__all__ += ["gather_residual", "ppermute", "psum", "psum_scatter", "reshard", "scan"]
__all__ += ["sum_gradients", "zero"]
