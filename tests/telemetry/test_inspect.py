"""inspect_update shows what update does, to NumPy's arithmetic, and changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.core.feedback import read_residual
from gradcomp._src.mesh.shard_maps import unreduce
from gradcomp.codecs import QSGD, FloatCast, OneBit, Ternary, TopK
from gradcomp.telemetry import inspect_update
from tests.plugins.slow_cases import slow
from tests.specs.methods import inspect as oracle_inspect
from tests.support import laws, modes
from tests.support.assertions import assert_same_bits
from tests.support.cases.inspect import WORKERS, close, gradients, of_workers, one, some

CODECS = {
  "qsgd": QSGD(bits=4, bucket_size=64),
  "ternary": Ternary(),
  "top_k": TopK(density=0.05, selection="exact"),
  "one_bit": OneBit(bucket_size=64),
  "aps": FloatCast(accumulate="float32"),
}


@pytest.mark.parametrize("codec", some(CODECS, ("qsgd", "ternary", "aps")))
def test_numbers_are_those_of_numpy(codec):
  """In the second step, when there are residuals."""
  tx = laws.compressed(codec, "all_gather", "error", min_leaf_size=0)

  def steps(before, grads):
    _, state = tx.update(before, tx.init(before))
    return state.residual, *inspect_update(tx, grads, state)

  grads = gradients(seed=2)
  old, mean, after, found = of_workers(steps)(gradients(seed=1), grads)
  found = one(found)
  sums = []
  for name, leaf in grads.items():
    corrected, unsent = leaf + np.asarray(old[name]), after.residual[name]
    sums.append(oracle_inspect.leaf(leaf, corrected, unsent, mean[name][0]))
    expected = oracle_inspect.metrics(sums[-1:])
    expected["residual_norm"] = np.sqrt(np.sum(np.square(unsent)) / WORKERS)
    close(found.leaves[f"['{name}']"], expected)
  close(found.total, oracle_inspect.metrics(sums))


def step_and_look(tx):
  """What a first step of all workers returns, and what inspect shows of it."""
  return of_workers(lambda grads: inspect_update(tx, grads, tx.init(grads)))


# Rows of 512 elements: three of a, and two of b, among four workers. c stays dense.
SHAPES = {"a": (3, 512), "b": (900,), "c": (5,)}
TWO_SHOT = laws.compressed(CODECS["qsgd"], "two_shot", "error", min_leaf_size=100)
LOOKS = step_and_look(TWO_SHOT)
seen = lambda grads: one(LOOKS(grads)[2])


@pytest.fixture(scope="module")
def in_vmap():
  """What inspect shows of a first step in vmap, and the state after it."""
  _, after, found = LOOKS(gradients(**SHAPES))
  return one(found), after


def averaged(grads):
  return jax.tree.map(lambda x: np.stack([x.mean(axis=0)] * len(x)), grads)


def test_gradients_that_are_averaged_already_are_warned_of():
  """In the table, and by `scalars`, whose record has the share as a number."""
  found = seen(averaged(gradients(**SHAPES)))
  assert [x.equal for x in (found.total, *found.leaves.values())] == [1] * 4
  assert str(found).splitlines()[-2].startswith("The gradient is the same on all")
  with pytest.warns(UserWarning, match="Delete the `pmean` before the exchange"):
    record = gradcomp.telemetry.scalars({"seen": found})
  assert record["seen/total/equal"] == 1


def test_gradients_that_differ_in_an_element_are_not(in_vmap):
  """One sign of one worker; or a small leaf that has equal gradients by chance."""
  elements = {name: np.prod(shape) for name, shape in SHAPES.items()}
  for name, size in elements.items():
    grads = averaged(gradients(**SHAPES))
    grads[name][-1].flat[size // 2] *= -1
    found = seen(grads)
    assert {x for x in SHAPES if found.leaves[f"['{x}']"].equal < 1} == {name}
    close(found.total, {"equal": 1 - size / sum(elements.values())})
    assert not found.warning
  assert in_vmap[0].total.equal == 0
  assert "The gradient is the same" not in str(in_vmap[0])


def test_zeros_and_one_worker_are_not_warned_of():
  found = seen(jax.tree.map(np.zeros_like, gradients(**SHAPES)))
  assert found.total.equal == 1 and not found.warning
  tx = gradcomp.dense(axis_name="data")
  alone = one(step_and_look(tx)({"w": np.ones((1, 8), np.float32)})[2])
  assert alone.total.equal == 0 and not alone.warning


def test_what_owners_keep_and_send_is_that_of_their_leaves(in_vmap):
  found, after = in_vmap
  (rows,) = after.server_residual[("data",)]
  squares = np.sum(np.square(rows), axis=(2, 3)).reshape(-1)
  parts = {"['a']": squares[:3], "['b']": squares[3:5], "['c']": squares[:0]}
  for name, part in parts.items():
    close(found.leaves[name], {"owner_residual_norm": np.sqrt(part.sum())})
  close(found.total, {"owner_residual_norm": np.sqrt(squares.sum())})
  params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
  plan = gradcomp.explain(TWO_SHOT, params, workers=WORKERS)
  assert found.total.bytes_sent == plan.bytes_sent
  for leaf in plan.leaves:  # the sum may be of fractions, which float32 rounds
    assert found.leaves[leaf.path].bytes_sent == np.float32(leaf.bytes_sent)


def numbers(tree, numpy=np):
  return numpy.concatenate([numpy.ravel(x) for x in jax.tree.leaves(tree)])


def looking(tx):
  """Returns numbers in place of the mean, so that modes.run can run it."""

  def update(grads, state, params=None):
    return {"found": numbers(inspect_update(tx, grads, state, params)[2], jnp)}, state

  return optax.GradientTransformation(tx.init, update)


OTHERS = slow("shard_map", "shard_map_unchecked", "pmap")


@pytest.mark.parametrize("mode", [modes.EXPLICIT, modes.AUTO, *OTHERS])
def test_all_modes_show_the_same(mode, in_vmap):
  """And types say that all workers have it, or P() would not be accepted."""
  (output,), _ = modes.run(mode, looking(TWO_SHOT), [gradients(**SHAPES)])
  for own in output["found"]:
    # The same sums in another order.
    np.testing.assert_allclose(own, numbers(in_vmap[0]), rtol=2e-5, atol=1e-6)


def test_one_plain_mean_is_sent_beside_the_exchange():
  """The gradient in float32, and six sums a leaf."""
  tx = gradcomp.qsgd(bits=4, axis_name="data", exchange="all_gather")
  own, stacked = ({"w": jnp.ones((*n, 128, 256))} for n in ((), (WORKERS,)))
  found = modes.collectives(looking(tx), own, stacked)
  exchanged = gradcomp.explain(tx, own, workers=WORKERS)
  more = sum(x.times * x.bytes_sent for x in found) - exchanged.bytes_sent
  # An all-reduce sends each share twice.
  assert more == 2 * 3 * 4 * (128 * 256 + 6) // WORKERS
  assert sum(x.dense_bytes for x in found) == 2 * 3 * 4 * 128 * 256 // WORKERS


@pytest.mark.parametrize("typed", [False, *slow(True)])
def test_leaves_that_are_cut_over_another_axis_are_measured_as_a_whole(typed):
  """Inside a map, and by their types. Buckets lie inside of the parts."""
  codec = QSGD(bits=4, bucket_size=64, rounding="nearest")
  tx = laws.compressed(codec, "all_gather", min_leaf_size=0)
  grads = gradients(workers=2, w=(8, 96), b=(64,))
  kinds = (AxisType.Explicit if typed else AxisType.Auto,) * 2
  mesh = jax.make_mesh((2, 2), ("data", "model"), kinds, devices=jax.devices()[:4])
  cut = {"w": P("data", "model"), "b": P("data")}
  put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
  placed = jax.tree.map(put, grads, cut)
  parts = {"w": P("model"), "b": P()}
  with jax.set_mesh(mesh):
    state = tx.init(jax.tree.map(lambda x, spec: put(x[0], spec), grads, parts))

  def of_types(grads, state):
    addends = unreduce(jax.tree.map(lambda x: x / 2, grads), "data")
    return inspect_update(tx, addends, state)[2]

  first = lambda grads: jax.tree.map(lambda x: x[0], grads)
  local = lambda grads, state: inspect_update(tx, first(grads), state)[2]
  specs = (cut, gradcomp.state_specs(state, axis_name="data"))
  mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())
  found = jax.jit(of_types if typed else mapped)(placed, state)
  whole = one(step_and_look(tx)(grads)[2]).total._asdict()
  names = ("gradient_norm", "relative_error", "cosine", "zeros")
  close(found.total, {name: whole[name] for name in names})


@pytest.mark.parametrize("stored", ["int8", *slow("bfloat16")])
def test_residuals_of_few_bits_are_read(stored):
  """What is shown is what the next step adds to its gradient."""
  feedback = gradcomp.ErrorFeedback(residual_dtype=stored)
  tx = laws.compressed(OneBit(), "all_gather", feedback, min_leaf_size=0)

  def step(grads):
    state = tx.init(grads)
    _, after, found = inspect_update(tx, grads, state)
    waits = read_residual(after.residual["w"]).astype(jnp.float32)
    return after, tx.update(grads, state)[1], waits, found

  after, plain, waits, found = of_workers(step)(gradients(workers=2, w=(5, 512)))
  assert_same_bits(after, plain)
  expected = np.sqrt(np.square(waits, dtype=np.float64).sum() / 2)
  close(one(found).leaves["['w']"], {"residual_norm": expected})
