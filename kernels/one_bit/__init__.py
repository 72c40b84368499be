"""Encodes and decodes 1-bit SGD."""

from gradcomp._src.kernels.gpu import dispatch
from gradcomp._src.kernels.one_bit import pallas
from gradcomp._src.kernels.one_bit import reference as reference

decode_rows = dispatch.with_kernel(reference.decode_rows, pallas.decode_on_tpu)
encode_rows = dispatch.encoder(reference, pallas)
