"""Bit packing and random bits for codecs of your own, and verdicts on kernels."""

from gradcomp._src.kernels.common.dithers import dither, random_lanes, signed_lane
from gradcomp._src.kernels.common.planes import pack_planes, unpack_planes
from gradcomp._src.kernels.common.threefry import fold_key, key_words, threefry2x32
from gradcomp._src.kernels.gpu.dispatch import Implementation
from gradcomp._src.kernels.gpu.self_check import kernel_verdicts
from gradcomp._src.kernels.gpu.verdicts import Verdict

__all__ = ["Implementation", "Verdict", "dither", "fold_key", "kernel_verdicts"]
__all__ += ["key_words", "pack_planes", "random_lanes", "signed_lane", "threefry2x32"]
__all__ += ["unpack_planes"]
