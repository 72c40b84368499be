"""Packs bfloat16 numbers into 12 bits each, without loss, and unpacks them."""

from gradcomp._src.kernels.lossless.reference import COLUMNS as COLUMNS
from gradcomp._src.kernels.lossless.reference import ESCAPES as ESCAPES
from gradcomp._src.kernels.lossless.reference import PLANES as PLANES
from gradcomp._src.kernels.lossless.reference import ROW_WORDS as ROW_WORDS
from gradcomp._src.kernels.lossless.reference import decode_rows as decode_rows
from gradcomp._src.kernels.lossless.reference import encode_rows as encode_rows
from gradcomp._src.kernels.lossless.reference import halves as halves
from gradcomp._src.kernels.lossless.reference import numbers as numbers
