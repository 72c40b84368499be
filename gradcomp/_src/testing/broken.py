"""``BrokenLaw``, and the one place that raises it for the findings of a law."""

import functools
import inspect
from collections.abc import Callable, Generator
from typing import Any, ParamSpec

import numpy as np

P = ParamSpec("P")

# The subject, what it must do, and what was found in its place, None where it holds.
# Then a place to look at, where it is another than the law's.
Finding = tuple[object, str, str | None] | tuple[object, str, str | None, str]
Findings = Generator[Finding, None, None]


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


def law(look: str = "") -> Callable[[Callable[P, Findings]], Callable[P, None]]:
  """Makes a law of a generator of findings, by raising the first one that is broken.

  Example:
    >>> @law(look="it")
    ... def is_even(number):
    ...   yield number, "be even", f"{number} is odd" if number % 2 else None
    >>> try: is_even(7)
    ... except BrokenLaw as error: print(error)
    is_even: 7 must be even, but 7 is odd; look at it.
  """

  def declared(function: Callable[P, Findings]) -> Callable[P, None]:
    @functools.wraps(function)
    def held(*args: P.args, **kwargs: P.kwargs) -> None:
      name, findings = function.__name__, function(*args, **kwargs)
      try:
        for subject, expected, found, *elsewhere in findings:
          if found is not None:
            place = elsewhere[0] if elsewhere else look
            # In the law, so that a traceback shows its line, and the error that it saw.
            findings.throw(BrokenLaw(name, subject, expected, found, place))
      except Exception as error:
        error.add_note(f"While trying gradcomp.testing.laws.{name}.")
        raise

    returning = inspect.signature(function).replace(return_annotation=None)
    held.__signature__ = returning  # type: ignore[attr-defined]
    return held

  return declared


def difference(got: Any, expected: Any, *, bits: bool = False) -> str | None:
  """Describes the first element in which two arrays differ; None if they are equal.

  With ``bits`` zeros of both signs differ. All NaN are equal.

  Example:
    >>> difference(np.array([1.0, 2.0]), np.array([1.0, 3.0]))
    'element [1] of float64[2] is 2.0 and not 3.0 (1 of 2 are wrong)'
  """
  got, expected = np.asarray(got), np.asarray(expected)
  if (got.shape, got.dtype) != (expected.shape, expected.dtype):
    return f"{described(got)} came in place of {described(expected)}"
  # Types of half precision are no floats for NumPy, but compare as such.
  same = (got == expected) | ((got != got) & (expected != expected))
  if bits and got.dtype.kind not in "iub":
    signs = (np.signbit(x.astype(np.float64)) for x in (got, expected))
    same &= np.equal(*signs) | (got != got)
  return first_wrong(~same, got, expected, of=f" of {described(got)}")


def first_wrong(
  wrong: np.ndarray, got: np.ndarray, expected: np.ndarray, *, of: str = ""
) -> str | None:
  """Describes the first element of two arrays where ``wrong`` is True, and counts them.

  Example:
    >>> x = np.arange(3)
    >>> first_wrong(x > 0, x, 2 * x, of=" of x")
    'element [1] of x is 1 and not 2 (2 of 3 are wrong)'
  """
  wrong, got, expected = map(np.atleast_1d, (wrong, got, expected))
  for place in np.argwhere(wrong):
    at = tuple(map(int, place))
    return (
      f"element {list(at)}{of} is {got[at]} and not {expected[at]} "
      f"({np.sum(wrong)} of {wrong.size} are wrong)"
    )
  return None


def described(x: Any) -> str:
  """Returns the dtype and the shape of an array, like ``float32[3,4]``.

  Example:
    >>> described(np.zeros((3, 4), np.float32))
    'float32[3,4]'
  """
  return f"{np.dtype(x.dtype).name}[{','.join(map(str, x.shape))}]"
