"""Codecs, and the protocol for codecs of your own."""

from gradcomp._src.codecs.block_top import BlockTop
from gradcomp._src.codecs.dense import Dense
from gradcomp._src.codecs.eight_bit import EightBit
from gradcomp._src.codecs.floats.block_float import BlockFloat
from gradcomp._src.codecs.floats.float_cast import FloatCast
from gradcomp._src.codecs.floats.lossless import Lossless
from gradcomp._src.codecs.floats.natural import Natural
from gradcomp._src.codecs.one_bit import OneBit
from gradcomp._src.codecs.policy import Policy
from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.codecs.qsgd import QSGD
from gradcomp._src.codecs.random_k import RandomK
from gradcomp._src.codecs.sign import Sign
from gradcomp._src.codecs.sums.records import Context, Encoded, Leaf, Memory
from gradcomp._src.codecs.sums.sum import Sum
from gradcomp._src.codecs.sums.tiles import Tiles
from gradcomp._src.codecs.ternary import Ternary
from gradcomp._src.codecs.top_k import TopK

__all__ = ["BlockFloat", "BlockTop", "Codec", "Context", "Dense", "EightBit", "Encoded"]
__all__ += ["FloatCast", "Leaf", "Lossless", "Memory", "Natural", "OneBit", "Policy"]
__all__ += ["QSGD", "RandomK", "Sign", "Sum", "Ternary", "Tiles", "TopK"]
