"""Checks the hyperparameters of QSGD, one by one and together."""

from typing import Literal

from gradcomp._src.checks import static_integer, step_count

ScaleNorm = Literal["max", "l2", "rms"]
Levels = Literal["sign_magnitude", "uniform", "nonuniform"]

_BITS_RULE = "1 to 8 or 16"
_ROTATE_RULE = "8, 32, or None to rotate nothing"


def checked_bits(value: int, levels: Levels) -> int:
  """Returns the width of a code; ValueError for all that no code can have."""
  bits = static_integer("bits", _BITS_RULE, value)
  if bits not in (1, 2, 3, 4, 5, 6, 7, 8, 16):
    raise ValueError(f"`bits` must be {_BITS_RULE}, got {bits}.")
  if bits == 1 and levels == "sign_magnitude":
    raise ValueError(
      '`bits` must be at least 2 with levels="sign_magnitude", which spends one bit '
      'on the sign, got 1; use levels="uniform".'
    )
  return bits


def checked_refit_every(value: int) -> int:
  """Returns the steps from one fit of levels to the next; ValueError for all else."""
  return step_count("refit_every", value)


def checked_rotate(value: int | None, bits: int, levels: Levels) -> int | None:
  """Returns the elements of a group that is rotated, or None; ValueError for others."""
  if value is None:
    return None
  size = static_integer("rotate", _ROTATE_RULE, value)
  if size not in (8, 32):
    raise ValueError(f"`rotate` must be {_ROTATE_RULE}, got {size}.")
  if bits not in (1, 2, 4):
    raise ValueError(
      f"`bits` must be 1, 2 or 4 with rotate={size}, got {bits}; only their words hold "
      "a multiple of 8 codes, across which groups lie."
    )
  if levels == "nonuniform":
    raise ValueError(
      f'`rotate` must be None with levels="nonuniform", got {size}; rotated elements '
      'are nearly Gaussian, for which norm="rms" has the levels.'
    )
  return size


def check_levels(
  bits: int,
  norm: ScaleNorm,
  levels: Levels,
  bucket_size: int | None,
  share_scale: bool,
) -> None:
  """Raises ValueError for hyperparameters that do not go together."""
  if levels == "nonuniform":
    _check_fitted(bits, norm, share_scale)
  if norm == "rms":
    _check_clipped(bits, levels, bucket_size)


def _check_fitted(bits: int, norm: ScaleNorm, share_scale: bool) -> None:
  """Raises ValueError for hyperparameters with which levels cannot be fitted."""
  if bits not in (2, 3, 4):
    raise ValueError(
      f'`bits` must be 2, 3 or 4 with levels="nonuniform", got {bits}; more '
      'levels than that gain nothing over levels="uniform".'
    )
  if norm != "max":
    raise ValueError(f'`norm` must be "max" with levels="nonuniform", got {norm!r}.')
  if share_scale:
    raise ValueError(
      '`share_scale` must be False with levels="nonuniform", whose codes cannot be '
      "added, got True."
    )


def _check_clipped(bits: int, levels: Levels, bucket_size: int | None) -> None:
  """Raises ValueError for hyperparameters that ``norm="rms"`` has no steps for."""
  if levels != "uniform":
    raise ValueError(
      '`levels` must be "uniform" with norm="rms", whose steps are those of levels '
      f"beside zero, got {levels!r}."
    )
  if bits > 4:
    raise ValueError(
      f'`bits` must be 1 to 4 with norm="rms", got {bits}; with more levels nothing '
      'needs to be clipped, so use norm="max".'
    )
  if bucket_size is None:
    raise ValueError(
      '`bucket_size` must be a number with norm="rms", got None; parts of a tensor '
      "that are larger than others would be clipped in every step."
    )
