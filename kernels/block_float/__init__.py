"""Scales blocks, casts them to floats of few bits and packs them, and decodes them."""

from gradcomp._src.kernels.block_float.reference import ELEMENTS as ELEMENTS
from gradcomp._src.kernels.block_float.reference import Element as Element
from gradcomp._src.kernels.block_float.reference import Form as Form
from gradcomp._src.kernels.block_float.reference import Scale as Scale
from gradcomp._src.kernels.block_float.reference import decode_rows as decode_rows
from gradcomp._src.kernels.block_float.reference import encode_rows as encode_rows
from gradcomp._src.kernels.block_float.reference import tensor_scales as tensor_scales
from gradcomp._src.kernels.block_float.reference import unpack as unpack
