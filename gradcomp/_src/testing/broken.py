"""``BrokenLaw``, and the one place that raises it for the findings of a law."""

import functools
import inspect
from collections.abc import Callable, Generator
from typing import Any, ParamSpec

import numpy as np

P = ParamSpec("P")

# The subject, its duty, and the finding, None where it holds. Then a place to look at,
# if it is not the law's.
Finding = tuple[object, str, str | None] | tuple[object, str, str | None, str]
Findings = Generator[Finding, None, None]


class BrokenLaw(AssertionError):
  """A law that a codec or a transformation does not hold.

  Attributes:
    law: the name of the law, a function of ``gradcomp.testing.laws``.

  Example:
    >>> str(BrokenLaw("a_law", "Codec()", "be even", "7 is odd", "`encode`"))
    'a_law: Codec() must be even, but 7 is odd; look at `encode`.'
  """

  def __init__(self, law: str, subject: object, expected: str, found: str, look: str):
    super().__init__(f"{law}: {subject} must {expected}, but {found}; look at {look}.")
    self.law = law


def law(
  example: str, look: str = ""
) -> Callable[[Callable[P, Findings]], Callable[P, None]]:
  """Makes a law of findings; it raises the first broken one, and names all errors."""

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
      except BrokenLaw:
        raise
      except Exception as error:
        told = f"{name}: {error}"
        error.args = (told,)
        if str(error) != told:  # its text is not that of its arguments
          raise RuntimeError(f"{name}: {error!r}") from error
        raise

    returning = inspect.signature(function).replace(return_annotation=None)
    held.__signature__ = returning  # type: ignore[attr-defined]
    call = f"{function.__name__}(gradcomp.{example})"
    held.__doc__ = f"{(held.__doc__ or '').rstrip()}\n\n  Example:\n    >>> {call}\n  "
    return held

  return declared


def difference(
  got: Any, expected: Any, *, of: str = "", bits: bool = False
) -> str | None:
  """Describes the first element in which two arrays differ; None for equal ones."""
  # With `bits` zeros of both signs differ. All NaN are equal.
  got, expected = np.asarray(got), np.asarray(expected)
  of = of and f"of {of} "
  if (got.shape, got.dtype) != (expected.shape, expected.dtype):
    return f"{of}{described(got)} came in place of {described(expected)}"
  # Types of half precision are no floats for NumPy, but compare as such.
  same = (got == expected) | ((got != got) & (expected != expected))
  if bits and got.dtype.kind not in "iub":
    signs = (np.signbit(x.astype(np.float64)) for x in (got, expected))
    same &= np.equal(*signs) | (got != got)
  found = first_wrong(~same, got, expected, of=f" of {described(got)}")
  return found and of + found


def first_wrong(
  wrong: np.ndarray, got: np.ndarray, expected: np.ndarray, *, of: str = ""
) -> str | None:
  """Describes the first of the elements where ``wrong`` is True, and counts them."""
  wrong, got, expected = map(np.atleast_1d, (wrong, got, expected))
  for at in map(tuple, np.argwhere(wrong).tolist()):
    what = f"element {list(at)}{of} is {got[at]} and not {expected[at]}"
    return f"{what} ({np.sum(wrong)} of {wrong.size} are wrong)"
  return None


def described(x: Any) -> str:
  """Returns the dtype and the shape of an array, like ``float32[3,4]``."""
  return f"{np.dtype(x.dtype).name}[{','.join(map(str, x.shape))}]"
