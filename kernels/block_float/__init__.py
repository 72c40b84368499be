"""Scales blocks, casts them to floats of few bits and packs them, and decodes them."""

from gradcomp._src.kernels.block_float import pallas
from gradcomp._src.kernels.block_float import reference as reference
from gradcomp._src.kernels.gpu import dispatch

decode_rows = dispatch.with_kernel(reference.decode_rows, pallas.decode_on_tpu)
encode_rows = dispatch.encoder(reference, pallas)
