"""Encodes and decodes 1-bit SGD."""

from gradcomp._src.kernels.gpu import dispatch
from gradcomp._src.kernels.one_bit import pallas, reference, tpu
from gradcomp._src.kernels.one_bit.reference import WORD as WORD
from gradcomp._src.kernels.one_bit.reference import Form as Form
from gradcomp._src.kernels.one_bit.reference import decode_columns as decode_columns
from gradcomp._src.kernels.one_bit.reference import encode_columns as encode_columns

decode_rows = dispatch.on_tpu(tpu.decode_rows, mosaic=True)(reference.decode_rows)
encode_rows = dispatch.encoder(reference, pallas, tpu)
