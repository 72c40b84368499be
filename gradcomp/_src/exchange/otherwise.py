"""``otherwise``: takes a step again, by codecs that hold all numbers, if it has NaN."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import lax

from gradcomp._src.codecs import protocol
from gradcomp._src.exchange import collectives, layout
from gradcomp._src.mesh import axes, study

Facts = TypeVar("Facts")
Taken = TypeVar("Taken", bound=tuple[Any, ...])  # the result that counts, and others


def by_fallbacks(facts: Facts) -> Facts:
  """Returns facts, a tree of layouts and codecs, by their fallbacks; else the same."""

  def of(x: Any) -> Any:
    if isinstance(x, layout.Layout):  # the same rows, so that owners keep theirs
      return dataclasses.replace(x, codecs=by_fallbacks(x.codecs))
    return (x.fallback or x) if isinstance(x, protocol.Codec) else x

  return jax.tree.map(of, facts)


def otherwise(
  taken: Taken,
  step: Callable[[Facts], Taken],
  facts: Facts,
  workers: axes.AxisName | None,
  *,
  alike: bool = True,
) -> Taken:
  """Returns ``taken``, or ``step`` by the fallbacks of its facts if its first has NaN.

  That has the same bits along the axes ``workers`` if ``alike``.
  """
  arrays, again = jax.tree.leaves(taken[0]), by_fallbacks(facts)
  # Studies read the usual step.
  if again == facts or not arrays or study.is_study():
    return taken
  # Devices that see something else must take one branch with these: XLA's permutations
  # wait for all devices of the program. Whoever has the same bits need not be asked.
  manual = {*axes.manual_axes()}
  own = set() if workers is None else {*axes.axis_names(workers)}
  asked = sorted(manual - own if alike else manual | own)
  repeat = jax.named_scope(collectives.REPEAT)(lambda: step(again))
  return lax.cond(collectives.any_nan(arrays, asked), repeat, lambda: taken)
