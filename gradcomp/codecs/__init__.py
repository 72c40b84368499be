"""Codecs: arrays to the words that cross the wire, and back."""

from gradcomp.codecs._codec import Codec as Codec
from gradcomp.codecs._codec import Payload as Payload
from gradcomp.codecs._codec import SharedCodec as SharedCodec
from gradcomp.codecs._codec import is_shared as is_shared
from gradcomp.codecs._dense import Dense as Dense
from gradcomp.codecs._qsgd import QSGD as QSGD
