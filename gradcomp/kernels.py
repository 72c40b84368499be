"""Bit packing and random bits for codecs of your own."""

from gradcomp._src import public as _public
from gradcomp._src.kernels.common.dithers import dither, random_lanes, signed_lane
from gradcomp._src.kernels.common.planes import pack_planes, unpack_planes
from gradcomp._src.kernels.common.threefry import fold_key, key_words, threefry2x32
from gradcomp._src.kernels.gpu.dispatch import Implementation

__all__ = [
  "Implementation",
  "dither",
  "fold_key",
  "key_words",
  "pack_planes",
  "random_lanes",
  "signed_lane",
  "threefry2x32",
  "unpack_planes",
]

_public.publish(globals())
