"""Codecs: arrays to the words that cross the wire, and back."""

from gradcomp.codecs._codec import AddingCodec as AddingCodec
from gradcomp.codecs._codec import Codec as Codec
from gradcomp.codecs._codec import ColumnCodec as ColumnCodec
from gradcomp.codecs._codec import FittedCodec as FittedCodec
from gradcomp.codecs._codec import Payload as Payload
from gradcomp.codecs._codec import RemainderCodec as RemainderCodec
from gradcomp.codecs._codec import SharedCodec as SharedCodec
from gradcomp.codecs._codec import from_tiles as from_tiles
from gradcomp.codecs._codec import is_adding as is_adding
from gradcomp.codecs._codec import is_by_column as is_by_column
from gradcomp.codecs._codec import is_fitted as is_fitted
from gradcomp.codecs._codec import is_shared as is_shared
from gradcomp.codecs._codec import to_tiles as to_tiles
from gradcomp.codecs._dense import Dense as Dense
from gradcomp.codecs._eight_bit import EightBit as EightBit
from gradcomp.codecs._float_cast import FloatCast as FloatCast
from gradcomp.codecs._one_bit import OneBit as OneBit
from gradcomp.codecs._qsgd import QSGD as QSGD
from gradcomp.codecs._ternary import Ternary as Ternary
