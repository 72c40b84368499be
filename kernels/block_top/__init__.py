"""Encodes and decodes the largest elements of blocks."""

from gradcomp._src.kernels.block_top import pallas
from gradcomp._src.kernels.block_top import reference as reference
from gradcomp._src.kernels.gpu import dispatch

encode_rows = dispatch.encoder(reference, pallas)
decode_rows = dispatch.with_kernel(reference.decode_rows, pallas.decode_on_tpu)
