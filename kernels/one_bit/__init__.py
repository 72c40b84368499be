"""Encodes and decodes 1-bit SGD."""

from gradcomp._src.kernels.gpu import dispatch
from gradcomp._src.kernels.one_bit import mosaic, pallas, reference
from gradcomp._src.kernels.one_bit.reference import WORD as WORD
from gradcomp._src.kernels.one_bit.reference import Form as Form
from gradcomp._src.kernels.one_bit.reference import decode_columns as decode_columns
from gradcomp._src.kernels.one_bit.reference import decode_rows as decode_rows
from gradcomp._src.kernels.one_bit.reference import encode_columns as encode_columns

encode_rows = dispatch.encoder(reference, pallas, mosaic)
