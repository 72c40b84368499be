"""Rounds elements under scales to codes, by QSGD, TernGrad or 8-bit types."""

from gradcomp._src.kernels.gpu import dispatch
from gradcomp._src.kernels.quantize import pallas, reference

encode_rows = dispatch.encoder(reference, pallas)
# For one payload: XLA decodes and adds several in one pass.
decode_rows = dispatch.with_kernel(reference.decode_rows, pallas.decode_on_tpu)
