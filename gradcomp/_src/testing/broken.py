"""``BrokenLaw``: a broken law, its subject, and the place to look."""

from typing import Any

import numpy as np


class BrokenLaw(AssertionError):
  """A law that a codec or a transformation does not hold.

  Its message is a sentence: the law, the expected and the found result, and the place
  to look.

  Attributes:
    law: the name of the law, a function of ``gradcomp.testing.laws``.

  Example:
    >>> str(BrokenLaw("a_law", "Codec()", "be even", "7 is odd", "`encode`"))
    'a_law: Codec() must be even, but 7 is odd; look at `encode`.'
  """

  def __init__(
    self, law: str, subject: object, expected: str, found: str, look: str
  ) -> None:
    super().__init__(f"{law}: {subject} must {expected}, but {found}; look at {look}.")
    self.law = law


def difference(got: Any, expected: Any, *, bits: bool = False) -> str | None:
  """Describes the first element in which two arrays differ; None if they are equal.

  Args:
    got: the array.
    expected: the expected array.
    bits: whether zeros of both signs differ. All NaN are equal.

  Example:
    >>> difference(np.array([1.0, 2.0]), np.array([1.0, 3.0]))
    'element [1] of float64[2] is 2.0 and not 3.0 (1 of 2 differ)'
  """
  got, expected = np.asarray(got), np.asarray(expected)
  if (got.shape, got.dtype) != (expected.shape, expected.dtype):
    return f"{described(got)} came in place of {described(expected)}"
  # Types of half precision are no floats for NumPy, but compare as such.
  same = (got == expected) | ((got != got) & (expected != expected))
  if bits and got.dtype.kind not in "iub":
    signs = (np.signbit(x.astype(np.float64)) for x in (got, expected))
    same &= np.equal(*signs) | (got != got)
  if same.all():
    return None
  index = tuple(int(i[0]) for i in np.nonzero(~np.atleast_1d(same)))
  return (
    f"element {list(index)} of {described(got)} is {np.atleast_1d(got)[index]} and not "
    f"{np.atleast_1d(expected)[index]} ({int((~same).sum())} of {same.size} differ)"
  )


def described(x: Any) -> str:
  """Returns the dtype and the shape of an array, like ``float32[3,4]``.

  Example:
    >>> described(np.zeros((3, 4), np.float32))
    'float32[3,4]'
  """
  return f"{np.dtype(x.dtype).name}[{','.join(map(str, x.shape))}]"
