"""Compressed collectives of sharded models."""

from gradcomp._src.parallel.gather import gather, gather_residual
from gradcomp._src.parallel.gather_scatter import all_gather, psum_scatter
from gradcomp._src.parallel.permutations import all_to_all, ppermute
from gradcomp._src.parallel.psum import psum, sum_gradients
from gradcomp._src.parallel.reshard import reshard
from gradcomp._src.parallel.scan import scan, scan_residual
from gradcomp._src.parallel.scan_shards import scan_shards
from gradcomp._src.parallel.zero.transform import zero

__all__ = ["all_gather", "all_to_all", "gather", "gather_residual", "ppermute", "psum"]
__all__ += ["psum_scatter", "reshard", "scan", "scan_residual", "scan_shards"]
__all__ += ["sum_gradients", "zero"]
