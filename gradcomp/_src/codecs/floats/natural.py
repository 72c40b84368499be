"""Natural: the codec that sends powers of two, as a sign and 7 bits of an exponent."""

import dataclasses
from typing import ClassVar

from jax import Array

from gradcomp._src import checks
from gradcomp._src.codecs import contractions, quantizing
from gradcomp._src.codecs.sums.records import Rounding
from gradcomp._src.kernels import float_cast
from gradcomp._src.kernels.common.float_codes import FloatFormat
from gradcomp._src.kernels.gpu import dispatch

# The 126 powers of two have the bias of IEEE formats, 63: so the square of each is a
# normal float32, and an optimizer's second moment neither overflows nor vanishes.
_FORMAT = FloatFormat(7, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Natural(quantizing.Elementwise):
  r"""Rounds each element to a neighboring power of two: natural compression.

  An element with :math:`a \le |v| < b`, where a and :math:`b = 2 a` are powers of two,
  becomes one of them at random, with its sign:

  .. math:: P(|Q(v)| = b) = \frac{|v| - a}{a}, \qquad
     E[Q(v)] = v, \qquad E[(Q(v) - v)^2] = (|v| - a)(b - |v|) \le \frac{v^2}{8}

  Every element has the same relative precision, whatever the others are: there are no
  buckets and no scales. A payload has 8 bits an element, in rows of 128 words.

  The paper sends a sign and all 8 exponent bits of ``float32``. Here the exponent has
  7, so that a code is a byte, and powers go from 2**-62 to 2**63. Below, an element
  becomes 2**-62 with the probability ``|v| / 2**-62``, or else zero: still unbiased,
  with a larger variance. Above 2**63 it becomes NaN where it is rounded up, because a
  smaller number would be a silent bias. NaN and infinities become NaN, each element by
  itself. Powers of two are exact. The grid of 2**-16 shortens the magnitude of a mean
  by less than ``2**-16 * a``. Elements below 2**-78 all become zero.

  Attributes:
    rounding: ``"stochastic"``, the paper's, or ``"nearest"``, which is biased. Of two
      equally near powers it takes the one with the even code: 2 for 1.5 and for 3.
      Default: ``"stochastic"``.
    implementation: the encoder; see :class:`gradcomp.codecs.Codec`. Default: None.

  Example:
    >>> codec = Natural()
    >>> x = jnp.array([1.0, -0.25, 0.0, 3.0])
    >>> payload = codec.encode(x, key=jax.random.key(0))
    >>> codec.decode(payload, like=x)
    Array([ 1.  , -0.25,  0.  ,  2.  ], dtype=float32)

  References:
    Horvath et al., `Natural Compression <https://arxiv.org/abs/1905.10988>`_, 2019,
    sections 2 and 3
  """

  rounding: Rounding = checks.field("stochastic", checks.choice(Rounding))
  implementation: dispatch.Implementation | None = checks.field(None, dispatch.RULE)

  papers: ClassVar[tuple[str, ...]] = ("horvath2019natural",)
  operation = float_cast
  row_words: ClassVar[int] = float_cast.Form.bucket_size

  @property
  def contraction(self) -> float:
    return contractions.of_energy(contractions.of_floats(1.0, self.rounding))

  @property
  def form(self) -> float_cast.Form:
    return float_cast.Form(
      _FORMAT, "stochastic" if self.needs_key else "nearest_even", saturate=False
    )

  def scales_for(self, x: Array) -> None:
    """Returns None: there are no scales."""

  def decode_rows(self, rows: Array) -> Array:
    return float_cast.decode_rows(rows, _FORMAT)
