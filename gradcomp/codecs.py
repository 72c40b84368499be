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
from gradcomp._src.codecs.protocol import Codec, LeafCodec
from gradcomp._src.codecs.qsgd import QSGD
from gradcomp._src.codecs.random_k import RandomK
from gradcomp._src.codecs.sign import Sign
from gradcomp._src.codecs.sums.records import (
  NOTHING,
  Context,
  Encoded,
  Leaf,
  Memory,
  Payload,
)
from gradcomp._src.codecs.sums.sum import Partial, Sent, Sum, SumFacts
from gradcomp._src.codecs.sums.tiles import Tiles
from gradcomp._src.codecs.ternary import Ternary
from gradcomp._src.codecs.top_k import TopK

__all__ = ["BlockFloat", "BlockTop", "Codec", "Context", "Dense", "EightBit", "Encoded"]
__all__ += ["FloatCast", "Leaf", "LeafCodec", "Lossless", "Memory", "NOTHING"]
__all__ += ["Natural", "OneBit", "Partial", "Payload", "Policy", "QSGD"]
__all__ += ["RandomK", "Sent", "Sign", "Sum", "SumFacts", "Ternary", "Tiles", "TopK"]
