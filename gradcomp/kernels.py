"""Bit packing and random bits for codecs of your own, and verdicts on kernels."""

from gradcomp._src.kernels.common.dithers import random_lanes, signed_lane
from gradcomp._src.kernels.common.planes import pack_planes, unpack_planes
from gradcomp._src.kernels.gpu.table import kernel_verdicts

__all__ = ["kernel_verdicts", "pack_planes", "random_lanes", "signed_lane"]
__all__ += ["unpack_planes"]
