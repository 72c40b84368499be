"""Encodes and decodes the largest elements of blocks."""

from gradcomp._src.kernels.block_top import pallas, reference, tpu
from gradcomp._src.kernels.block_top.reference import Form as Form
from gradcomp._src.kernels.block_top.reference import entries_of_rows as entries_of_rows
from gradcomp._src.kernels.gpu import dispatch

encode_rows = dispatch.encoder(reference, pallas, tpu=tpu)
decode_rows = dispatch.on_tpu(tpu.decode_rows, mosaic=True)(reference.decode_rows)
