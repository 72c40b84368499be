"""Selection methods: ways to find the elements of a row to send."""

from typing import Literal

import jax

from gradcomp._src.kernels.common.row_view import Row
from gradcomp._src.kernels.common.selection import at_least, largest, trimmed
from gradcomp._src.kernels.gpu.dispatch import Implementation

Selection = Literal["auto", "exact", "trimmed", "threshold", "sampled"]

# Fang 2018, sections 2.1 and 3.1: 128 KB of float32.
_SMALL = 1 << 15
# From this size on up to twice the needed elements are sent, which is no large message.
_LARGE = 1 << 20


def method_of(selection: Selection, size: int) -> Selection:
  """Returns the selection for a row of ``size`` elements, with ``"auto"`` resolved.

  Example:
    >>> [method_of("auto", size) for size in (1000, 100_000, 10_000_000)]
    ['exact', 'trimmed', 'threshold']
  """
  if selection != "auto":
    return selection
  if size < _SMALL:
    return "exact"
  return "trimmed" if size < _LARGE else "threshold"


def selected_in(
  x: Row,
  method: Selection,
  sent: int,
  slots: int,
  *,
  sign: jax.Array | None,
  first: jax.Array | None,
  implementation: Implementation | None,
) -> jax.Array:
  """Returns the positions of the elements of a row to send, ``int32[slots]``.

  Args:
    x: the row.
    method: a selection other than ``"auto"``.
    sent: the number of elements to send.
    slots: the most elements that may be sent.
    sign: the sign to send, 1 or -1; None to send both.
    first: the threshold to try first; 0 or None for none.
    implementation: the implementation that counts and lists elements.
  """
  if method == "exact":
    return largest(x, sent, sign)
  if method == "trimmed":
    most = min(x.size, 2 * sent)
    return trimmed(x, sent, most, sign=sign, implementation=implementation)
  return at_least(x, sent, slots, sign=sign, first=first, implementation=implementation)
