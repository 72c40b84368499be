"""Encodes and decodes the largest elements of blocks."""

from gradcomp._src.kernels.block_top import pallas, reference
from gradcomp._src.kernels.block_top.form import Form as Form
from gradcomp._src.kernels.block_top.reference import decode_rows as decode_rows
from gradcomp._src.kernels.block_top.reference import entries_of_rows as entries_of_rows
from gradcomp._src.kernels.gpu import dispatch

encode_rows = dispatch.encoder(reference, pallas)
