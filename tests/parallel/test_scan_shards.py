"""Layers of FSDP in a loop: words that a host keeps, whole layers, and residuals."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from gradcomp import parallel
from tests.parallel import table_scans
from tests.support.assertions import says
from tests.support.cases.parallel import mapped_over, nbytes
from tests.support.cases.scan import KEY, ROWS, WIDTH, body, layers_of, loss_of, whole

(ROW,) = (row for row in table_scans.rows(table_scans.TABLE) if row.door == "copy")
N, CHIPS = ROW.workers, 2
WEIGHTS, GRADS = ROW.options["params"], ROW.options["grads"]


def payload(codec):
  """The bytes of a worker's shards of one layer."""
  return sum(nbytes(codec, size) for size in (WIDTH // N, WIDTH * WIDTH // N))


def test_the_backward_pass_sends_no_weights_between_hosts():
  sent = collections.Counter()
  for axis, part in table_scans.run(ROW).door.report.by_axis.items():
    for x in part.collectives:
      sent[axis, x.kind] += x.times * x.bytes_sent
  assert sent == {
    ("host,chip", "all-gather"): LENGTH * (N - 1) * payload(WEIGHTS),
    ("host,chip", "all-to-all"): LENGTH * (N - 1) * payload(GRADS),
    ("chip", "all-gather"): (LENGTH - 1) * (N - N // CHIPS) * payload(WEIGHTS),
  }


def scanned(inner, x, shards):
  given = dict(ROW.options, key=KEY, backward_axis_name=inner)
  return parallel.scan_shards(body, x, shards, **given)


of = lambda *shape: jax.ShapeDtypeStruct((N, *shape), "float32")
LENGTH, OWN = ROW.length, WIDTH // N
SHAPES = of(ROWS, WIDTH), {"b": of(LENGTH, OWN), "w": of(LENGTH, OWN, WIDTH)}


def test_a_worker_keeps_the_share_of_a_chip():
  """Of all layers but the last, of which the backward pass has all words."""

  def saved(inner):
    pull = lambda x, w: jax.tree.leaves(jax.vjp(lambda w: scanned(inner, x, w), w)[1])
    found = jax.eval_shape(mapped_over(dict(ROW.axes), pull), *SHAPES)
    return sum(x.size * x.dtype.itemsize for x in found) // N

  kept = (LENGTH - 1) * N * payload(WEIGHTS) // CHIPS
  assert saved("chip") - saved(None) == kept


@pytest.mark.parametrize("inner", ["model", ROW.axis_name, (), ("chip", "chip"), 1])
def test_axes_that_are_not_those_of_some_workers_are_refused(inner):
  run = lambda x, w: scanned(inner, x, w)
  words = ["`backward_axis_name`", "('host', 'chip')", str(inner)]
  with pytest.raises(ValueError, match=says(*words)):
    jax.eval_shape(mapped_over(dict(ROW.axes), run), *SHAPES)


PLAIN = dict(axis_name="data", params=None, grads=None)


def test_whole_layers_are_constant():
  layers, x, weights = layers_of(3), whole(ROWS, WIDTH, seed=5), whole(3, WIDTH, seed=6)
  shards = jax.tree.map(lambda x: np.stack(np.split(x, 4, axis=1)), layers)

  def loss(shards, layers):
    values = parallel.scan_shards(body, x, shards, whole=layers, **PLAIN)
    return loss_of(values, weights)

  grads = jax.vmap(jax.grad(loss, (0, 1)), (0, None), axis_name="data")
  rows, zeros = jax.device_get(jax.jit(grads)(shards, layers))
  assert all(x.any() for x in jax.tree.leaves(rows))
  assert not any(x.any() for x in jax.tree.leaves(zeros))


@pytest.mark.parametrize(
  "spec, missing", [(P("model"), "data"), (P("data"), "model")], ids=str
)
def test_a_residual_that_jax_would_add_up_is_refused(spec, missing):
  """It is typed as equal on all workers, or over an axis over which shards differ."""
  layer = lambda x, w: (x @ w, None)
  run = lambda x, w, e: parallel.scan_shards(layer, x, w, residual=e, **PLAIN)[0]
  names, kinds = ("data", "model"), (AxisType.Auto,) * 2
  every, mesh = P(names), jax.make_mesh((2, 2), names, kinds)
  specs = dict(in_specs=(every, P(None, names), spec), out_specs=every)
  step = jax.shard_map(run, mesh=mesh, **specs)
  shapes = jnp.ones((8, 4)), jnp.ones((3, 8, 4)), jnp.ones((6, 4, 4))
  words = "`residual`", f"['{missing}']", "in_specs"
  with pytest.raises(ValueError, match=says(*words)):
    jax.eval_shape(step, *shapes)
