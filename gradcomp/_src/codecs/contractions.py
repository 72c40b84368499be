"""Contractions of codecs: bounds of residuals, as ``testing.laws`` measures them."""

import math

SHARING = 8  # workers that scales are shared by: more have larger ones

_LEAST = 1 / 32  # of codecs that draw: their residuals are noise
_TENSOR = 2**24  # elements: few leaves have more


def of_energy(energy: float, *, draws: bool = False) -> float:
  """Returns the contraction by which a residual has at most this energy."""
  contraction = 1 / (1 + energy)
  return 0.0 if draws and contraction < _LEAST else contraction


def of_floats(step: float, rounding: str) -> float:
  """Returns a float's largest relative squared error; ``step`` is its epsilon."""
  if rounding == "stochastic":
    return step**2 / (4 * (1 + step))
  most = step if rounding == "toward_zero" else step / 2
  return (most / (1 + most)) ** 2


def of_levels(intervals: float, size: int | None, *, draws: bool) -> float:
  """Returns the energy with equal intervals up to the largest of ``size`` numbers."""
  if intervals < 1:
    return math.inf
  size = min(size or _TENSOR, _TENSOR)
  if intervals == 1 and draws:
    # Small elements become the largest one, or nothing. So the energy grows with the
    # bucket: 4.2 with 32 elements, 17 with 128, 69 with 512.
    return size / 7
  largest_square = 2.5 * math.log(2 * size)  # of normal numbers and their residuals
  energy = largest_square / intervals**2 / (6 if draws else 12)
  return energy if intervals >= 2 else 3 * energy


def of_lengths(intervals: float, size: int | None, *, draws: bool) -> float:
  """Returns the energy with equal intervals from 0 to the l2 norm of a bucket."""
  lost = min(size or _TENSOR, _TENSOR) / intervals**2 / (4 if draws else 11)
  return lost / (1 - lost) if lost < 1 else math.inf


def of_signs(size: int) -> float:
  """Returns the contraction with a mean magnitude for each bucket, or for each sign."""
  # If one gradient repeats, the largest elements are delayed most.
  return min(1.0, 0.8 / math.log(2 * min(size, _TENSOR)))


def of_clipped(sigmas: float) -> float:
  """Returns the energy if normal numbers become 0 or ``sigmas`` at random, at most."""
  held = math.erf(sigmas / math.sqrt(2))
  beyond = math.exp(-(sigmas**2) / 2)
  mean = math.sqrt(2 / math.pi) * (1 - beyond) + sigmas * (1 - held)
  lost = sigmas * mean + 1 - 2 * held
  return 1.25 * lost / (1 - lost) if lost < 1 else math.inf
