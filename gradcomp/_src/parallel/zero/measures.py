"""Measures of a ZeRO step, for `gradcomp.telemetry.inspect`.

No worker has the mean of a leaf: each owner has some of its rows. So measures of the
mean are NaN. Owners measure the updates that they send, row by row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.core.measures import Sums
from gradcomp._src.core.state import CompressState, OwnedRows, measures, with_measures
from gradcomp._src.exchange.collectives import STAGE, psum
from gradcomp._src.mesh.axes import axis_names
from gradcomp._src.parallel.zero.shared_rows import SharedRows


class Changes(NamedTuple):
  """A worker's rows: differences of the master and the parameters, and sent updates.

  Attributes:
    before: the master minus the parameters before the step.
    sent: the decoded updates.
    after: the master minus the parameters after the step.
  """

  before: OwnedRows
  sent: OwnedRows
  after: OwnedRows


def measured_zero(
  state: CompressState, rows: SharedRows, changes: Changes
) -> CompressState:
  """Returns the state of the gradients, with sums of both directions if inspected.

  There are twice as many as leaves: those of gradients, and behind them those of the
  updates of parameters.
  """
  found = measures(state)
  if found is None:
    return state
  back = _sums(rows, changes)
  nan = jnp.full_like(found.union, jnp.nan)
  gradients = found._replace(owned=back.owned, union=nan)
  both = jax.tree.map(lambda *x: jnp.concatenate(x), gradients, back)
  return with_measures(state, both)


def _sums(rows: SharedRows, changes: Changes) -> Sums:
  """Returns the sums of the updates that owners send, by leaf."""
  count = len(rows.plan.names)
  columns = ("size", "gradient", "owned", "mean", "product", "zeros")
  result = {name: jnp.zeros(count, jnp.float32) for name in columns}
  elements, numbers = rows.elements(), rows.numbers()
  own = axis_names(rows.workers.axis_name)
  for axes in changes.before.arrays:
    sums = jnp.zeros((len(columns), count), jnp.float32)
    parts = [x.arrays[axes] for x in (*changes, elements, numbers)]
    for *given, here, leaf in zip(*parts, strict=True):
      wanted, sent, kept = (jnp.where(here, x, 0.0) for x in given)
      ones = jnp.broadcast_to(here, wanted.shape).astype(jnp.float32)
      zeros = ones * (sent == 0)
      terms = (ones, wanted**2, kept**2, sent**2, sent * wanted, zeros)
      by_row = [jnp.sum(x, axis=range(1, x.ndim)) for x in terms]
      sums += jax.vmap(lambda x, leaf=leaf: _by_leaf(x, leaf, count))(jnp.stack(by_row))
    others = tuple(name for name in axes if name not in own)
    with jax.named_scope(STAGE):
      sums = psum(sums, (*own, *others))
    for name, column in zip(columns, sums, strict=True):
      result[name] += column
  nan = jnp.full(count, jnp.nan, jnp.float32)
  none = jnp.zeros(count, jnp.float32)
  return Sums(
    **result,
    residual=none,
    corrected=result["gradient"],
    unsent=result["owned"],
    true=result["gradient"],
    top=nan,
    levels=nan,
    spread=nan,
    union=result["size"] - result["zeros"],
    exponents=jnp.full((count, 256), jnp.nan, jnp.float32),
  )


def _by_leaf(x: jax.Array, leaf: jax.Array, count: int) -> jax.Array:
  """Adds up values of rows by the numbers of their leaves, ``float32[count]``."""
  same = leaf[:, None] == lax.iota(jnp.int32, count)
  return jnp.sum(jnp.where(same, x[:, None], 0.0), axis=0)
