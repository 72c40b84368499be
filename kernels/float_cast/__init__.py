"""Casts arrays to floats of few bits and packs them, and decodes them."""

from gradcomp._src.kernels.float_cast import pallas, reference
from gradcomp._src.kernels.float_cast.reference import Form as Form
from gradcomp._src.kernels.float_cast.reference import decode_rows as decode_rows
from gradcomp._src.kernels.float_cast.reference import exponent_byte as exponent_byte
from gradcomp._src.kernels.float_cast.reference import shift as shift
from gradcomp._src.kernels.float_cast.reference import unshifted as unshifted
from gradcomp._src.kernels.float_cast.reference import width as width
from gradcomp._src.kernels.gpu import dispatch

encode_rows = dispatch.encoder(reference, pallas)
