"""Copies that differ are found in every mode, and the leaf and the worker named."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.core.fingerprint import leaf_fingerprints
from gradcomp._src.telemetry.replicas import Replicas
from tests.errors import table
from tests.plugins.slow_cases import slow
from tests.support import flips, low_rank, modes
from tests.support.assertions import assert_same_bits, says

WORKERS = 4


def trees(*changes, workers=WORKERS):
  """A tree for each worker; ``(worker, leaf, bit)`` flips a bit of one."""
  tree = {"w": low_rank.gaussian(6, 8), "b": np.ones(3, np.float16)}
  result = [dict(tree) for _ in range(workers)]
  for worker, leaf, bit in changes:
    result[worker][leaf] = flips.flip(result[worker][leaf], bit)
  return result


def check(tree):
  return gradcomp.telemetry.compare_replicas(tree, axis_name="data")


def found(mode, parts):
  """What the workers of a mode find, each with its own tree."""
  if mode in ("vmap", "pmap"):
    transform = jax.vmap if mode == "vmap" else jax.pmap
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *parts)
    mapped = transform(check, axis_name="data")
    every = (jax.jit(mapped) if mode == "vmap" else mapped)(stacked)
    assert_same_bits(every.words[0], every.words[-1])
    return jax.tree.map(lambda x: x[0], every)
  kind = AxisType.Explicit if "explicit" in mode else AxisType.Auto
  mesh = modes.mesh(len(parts), kind)
  copies = flips.copies(parts, mesh)
  if mode.startswith("outside"):
    return check(copies)
  if mode == "explicit":
    return jax.jit(check)(copies)
  if mode == "jit":
    with jax.set_mesh(mesh):
      return jax.jit(check)(copies)
  options = dict(in_specs=P(), out_specs=P(), check_vma=mode == "shard_map")
  return jax.jit(jax.shard_map(check, mesh=mesh, **options))(copies)


MODES = ("shard_map", "vmap", "explicit", "jit", "outside")
MODES += tuple(slow("shard_map_unchecked", "pmap", "outside_explicit"))


@pytest.mark.parametrize("mode", MODES)
def test_a_flipped_bit_is_found_in_every_mode(mode):
  same = found(mode, trees())
  assert bool(same.equal) and same.differing() == {}
  same.require_equal()
  assert same.leaves == ("['b']", "['w']")
  whole = gradcomp.telemetry.fingerprint(trees()[0])
  assert_same_bits(same.words[0].sum(axis=0), whole)
  other = found(mode, trees((2, "w", 100)))
  assert not bool(other.equal) and other.differing() == {"['w']": [2]}
  with pytest.raises(RuntimeError, match=says("1 of 2 leaves", "['w']: worker 2\n")):
    other.require_equal()


SEVERAL = [(0, "b", 3), (3, "w", 0), (5, "w", 0)]
# Workers, what is flipped, the workers that differ by leaf, and what is said.
FLIPPED = [
  (6, SEVERAL, {"['b']": [0], "['w']": [3, 5]}, ["2 of 2", "workers 3, 5"]),
  (2, [(1, "w", 0)], {"['w']": [0, 1]}, ["['w']", "no more than half"]),
  (4, [(0, "w", 0), (1, "w", 1)], {"['w']": [0, 1, 2, 3]}, ["no more than half"]),
]


@pytest.mark.parametrize(("workers", "changes", "differing", "words"), FLIPPED)
def test_several_leaves_and_workers_are_named(workers, changes, differing, words):
  """And a tie names nobody."""
  seen = list(map(leaf_fingerprints, trees(*changes, workers=workers)))
  found = Replicas(jnp.stack(seen), ("['b']", "['w']"))
  assert found.differing() == differing
  with pytest.raises(RuntimeError, match=says(*words)):
    found.require_equal()


def loss_fn(params, batch):
  return jnp.mean((batch @ params["w"] + params["b"]) ** 2)


def training(mesh, optimizer, spec, **options):
  """A step, and its first parameters and state."""
  place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
  params = {"b": place(jnp.zeros(32), P()), "w": place(jnp.full((64, 32), 0.5), spec)}
  with jax.set_mesh(mesh):
    state = optimizer.init(params)
  given = dict(axis_name="data", mesh=mesh, options=gradcomp.TrainOptions(**options))
  return gradcomp.make_train_step(loss_fn, optimizer, **given), params, state


def flipped(x, mesh, worker):
  """A parameter of which one worker's copy has another bit."""
  shards = x.addressable_shards
  parts = [np.asarray(shard.data) for shard in shards]
  devices = [shard.device for shard in shards]
  number = devices.index(mesh.devices.reshape(WORKERS, -1)[worker, 0])
  parts[number] = flips.flip(parts[number], 7)
  parts = list(map(jax.device_put, parts, devices))
  return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


QSGD = gradcomp.qsgd(bits=8, axis_name="data", min_leaf_size=0, feedback="error")
TRAININGS = [
  ("alone", AxisType.Auto, QSGD),
  *slow(
    ("alone", AxisType.Explicit, gradcomp.skip_nonfinite(QSGD, 3, axis_name="data")),
    ("model", AxisType.Auto, QSGD),
    ("model", AxisType.Explicit, QSGD),
  ),
]


@pytest.mark.parametrize(("axes", "kind", "exchange"), TRAININGS)
def test_a_training_sees_it_at_the_next_check(axes, kind, exchange):
  if axes == "model" and kind == AxisType.Explicit and jax.__version__ < "0.12":
    pytest.skip("drops an Explicit model sharding beside another axis: notes in docs")
  shape = (WORKERS,) if axes == "alone" else (WORKERS, 2)
  names = ("data", "model")[: len(shape)]
  devices = jax.devices()[: WORKERS * (len(shape) == 2) + WORKERS]
  mesh = jax.make_mesh(shape, names, (kind,) * len(shape), devices=devices)
  optimizer = optax.chain(exchange, optax.sgd(0.1))
  spec = P(None, "model") if axes == "model" else P()
  step, params, state = training(mesh, optimizer, spec, compare_every=3)
  batch = jnp.ones((WORKERS, 64))
  seen = []
  for number in range(7):
    params, state, metrics = step(params, state, batch)
    seen.append(metrics["replicas"].differing())
    assert metrics["replicas"].words.any() == (number % 3 == 0)
    if number == 3:
      params["w"] = flipped(params["w"], mesh, 2)
  assert seen == [{}] * 6 + [{"['w']": [2]}]


def test_a_check_changes_no_result_and_takes_at_most_a_copy_of_the_parameters():
  mesh = modes.mesh(WORKERS)
  batch = jnp.ones((WORKERS, 64))
  results, memory = [], []
  for options in ({}, {"compare_every": 1}):
    step, *given = training(mesh, QSGD, P(), **options)
    memory.append(step.lower(*given, batch).compile().memory_analysis())
    *result, metrics = step(*given, batch)
    results.append((*result, metrics["loss"]))
  assert_same_bits(*results)
  plain, checked = memory
  assert checked.alias_size_in_bytes == plain.alias_size_in_bytes
  # Fingerprints of two leaves and four workers; the parameters have 8,320 bytes. XLA of
  # JAX 0.12 copies these, because the branch reads what the step writes over.
  more = checked.temp_size_in_bytes - plain.temp_size_in_bytes
  assert more <= (1024 if jax.__version_info__ < (0, 12) else 1024 + 8320)


def make(optimizer, every, axis_name="data"):
  options = gradcomp.TrainOptions(compare_every=every)
  given = dict(mesh=modes.mesh(WORKERS) if axis_name else None, options=options)
  return gradcomp.make_train_step(loss_fn, optimizer, axis_name=axis_name, **given)


ROWS = """
check({"w": jnp.ones(3)}) -> `axis_name` ... 'data' ... ()
check({"w": CUT}) -> `tree`['w'] ... whole along 'data'
make(QSGD, 2, axis_name=None) -> `compare_every` ... axis_name=None
make(PLAIN, 2)(PARAMS, PLAIN.init(PARAMS), jnp.ones((WORKERS, 64))) ->
  `optimizer` ... compare_every=2
"""
CUT = jax.device_put(jnp.ones(8), NamedSharding(modes.mesh(WORKERS), P("data")))
PLAIN, PARAMS = optax.sgd(0.1), {"b": jnp.zeros(32), "w": jnp.ones((64, 32))}
test_what_cannot_be_compared = table.refused(ROWS, globals())
