"""Inner loops of the codecs: a jnp reference that is also the fast path on CPU."""

from gradcomp.kernels import blocks as blocks
from gradcomp.kernels import dispatch as dispatch
from gradcomp.kernels import eight_bit as eight_bit
from gradcomp.kernels import float_cast as float_cast
from gradcomp.kernels import float_codes as float_codes
from gradcomp.kernels import float_formats as float_formats
from gradcomp.kernels import levels as levels
from gradcomp.kernels import lines as lines
from gradcomp.kernels import listing as listing
from gradcomp.kernels import marks as marks
from gradcomp.kernels import one_bit as one_bit
from gradcomp.kernels import planes as planes
from gradcomp.kernels import qsgd as qsgd
from gradcomp.kernels import rows as rows
from gradcomp.kernels import scales as scales
from gradcomp.kernels import selection as selection
from gradcomp.kernels import sparse as sparse
from gradcomp.kernels import ternary as ternary
from gradcomp.kernels.dispatch import Implementation as Implementation
from gradcomp.kernels.planes import pack_planes as pack_planes
from gradcomp.kernels.planes import unpack_planes as unpack_planes
from gradcomp.kernels.threefry import fold_key as fold_key
from gradcomp.kernels.threefry import key_words as key_words
from gradcomp.kernels.threefry import random_lanes as random_lanes
from gradcomp.kernels.threefry import threefry2x32 as threefry2x32
