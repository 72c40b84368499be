"""Repeats of a step: by codecs that hold all numbers, if the first ones did not."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from gradcomp._src.exchange.collectives import REPEAT, any_nan
from gradcomp._src.mesh import study
from gradcomp._src.mesh.axes import AxisName, axis_names, manual_axes


def once_more(
  taken: tuple[Any, Any], again: Callable[[], Any] | None, axes: AxisName | None
) -> Any:
  """Returns updates and a state, or those that ``again`` takes if updates hold NaN.

  Steps exchange words over ``axes``, along which the updates have the same bits; over
  none if ``axes`` is None.
  """
  updates = jax.tree.leaves(taken[0])
  # Studies read the usual step.
  if again is None or not updates or study.is_study():
    return taken
  repeat = jax.named_scope(REPEAT)(again)
  # Devices along other axes have other updates, but must take one branch with these:
  # XLA's permutations wait for all devices of the program. Along the workers' axes
  # nobody has to ask.
  asked = () if axes is None else sorted({*manual_axes()} - {*axis_names(axes)})
  return lax.cond(any_nan(updates, asked), repeat, lambda: taken)
