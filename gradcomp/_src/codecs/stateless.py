"""A check that a codec can encode an array without codec state or residual."""

from typing import Any, cast

from gradcomp._src.codecs.one_bit import OneBit
from gradcomp._src.codecs.policy import Policy
from gradcomp._src.codecs.protocol import Codec, LeafCodec, is_fitted
from gradcomp._src.codecs.rounds import RoundsCodec
from gradcomp._src.codecs.sparse import DroppingCodec


def stateless(name: str, codec: Any, *, corrected: bool | None = None) -> Codec:
  """Returns the codec, if one payload of it can stand for the whole array.

  Args:
    name: the name of the argument, for the message.
    codec: what was given for it.
    corrected: whether a residual holds what the payload lacks; None where there can be
      none.

  Raises:
    ValueError: ``codec`` sends some of the elements, keeps a memory, or needs error
      feedback that it does not get.
    TypeError: ``codec`` is no codec.

  Example:
    >>> stateless("codec", gradcomp.codecs.QSGD(bits=8)).bits
    8
    >>> stateless("codec", gradcomp.codecs.TopK())  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: `codec` must send every element, because ..., got TopK(...
  """
  if isinstance(codec, RoundsCodec):
    rule = "be without a memory, which nothing here carries from call to call"
  elif isinstance(codec, Policy):
    rule = "be the codec of one array, not of a tree's leaves by their paths"
  elif not isinstance(codec, LeafCodec) or not isinstance(codec, Codec):
    raise TypeError(
      f"`{name}` must be a codec of gradcomp.codecs, got {codec!r}; "
      "gradcomp.codecs.Dense() sends float32."
    )
  elif isinstance(codec, DroppingCodec):
    rule = "send every element, because what is left out is never sent later"
  elif isinstance(codec, OneBit) and not corrected:
    rule = "work without error feedback, which nothing here keeps for it"
    if corrected is not None:
      rule = "work without error feedback where `residual` is None"
  elif is_fitted(codec):
    rule = "be without a memory, which nothing here carries from call to call"
  else:
    return cast(Codec, codec)
  raise ValueError(
    f"`{name}` must {rule}, got {codec}; choose EightBit, QSGD, FloatCast, Natural, "
    "Ternary or Dense. Gradients of weights go through gradcomp.compress, which has "
    "residuals and memories."
  )
