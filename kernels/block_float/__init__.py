"""Scales blocks, casts them to floats of few bits and packs them, and decodes them."""

from gradcomp._src.kernels.block_float import pallas, reference, tpu
from gradcomp._src.kernels.block_float.product import dot as dot
from gradcomp._src.kernels.block_float.product import multiply as multiply
from gradcomp._src.kernels.block_float.reference import ELEMENTS as ELEMENTS
from gradcomp._src.kernels.block_float.reference import Element as Element
from gradcomp._src.kernels.block_float.reference import Form as Form
from gradcomp._src.kernels.block_float.reference import Scale as Scale
from gradcomp._src.kernels.block_float.reference import tensor_scales as tensor_scales
from gradcomp._src.kernels.block_float.reference import unpack as unpack
from gradcomp._src.kernels.gpu import dispatch

decode_rows = dispatch.on_tpu(tpu.decode_rows, mosaic=True)(reference.decode_rows)
encode_rows = dispatch.encoder(reference, pallas, tpu, refusal=pallas.refusal)
