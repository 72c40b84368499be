"""``mean_over``: rows are workers, and their mean is that of an exchange."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp.codecs import QSGD, Dense, OneBit, TopK
from tests.plugins.slow_cases import slow
from tests.support import laws, modes
from tests.support.assertions import assert_same_bits
from tests.support.cases.steps import put

ROWS = 4
QSGD4 = QSGD(bits=4)


def stacked(seed):
  """Draws rows; two_shot sends the mean of the first leaf in a second stage."""
  drawn = laws.tree({"w": (256, 512), "b": (77,), "s": ()}, ROWS, seed=seed)
  return {"w": drawn["w"], "rest": (drawn["b"], drawn["s"])}


TREES = [stacked(0), stacked(1)]


def started(place, codec):
  """``step(rows, state)``, its first state, and what puts rows where they lie."""
  given, mesh, lay = {"codec": codec}, contextlib.nullcontext(), lambda x: x
  if place != "one device":
    devices = modes.mesh(ROWS, AxisType.Auto if place == "in a map" else place)
    lay = lambda tree: put(tree, devices, "data")
    given, mesh = given | {"mesh_axis": "data"}, jax.set_mesh(devices)
  with mesh:
    state = gradcomp.local.mean_state(lay(TREES[0]), **given)
  step = lambda x, s: gradcomp.mean_over(x, state=s, **given)
  if place == "in a map":
    specs = gradcomp.state_specs(state, axis_name="data")
    io = {"in_specs": (P("data"), specs), "out_specs": (P(), specs)}
    step = jax.shard_map(step, mesh=devices, **io)
  return jax.jit(step), state, lay


@pytest.mark.bits
@pytest.mark.parametrize("codec", [QSGD4, *slow(OneBit(), TopK(density=0.05))], ids=str)
def test_rows_are_the_workers_of_an_exchange(codec):
  """Means and states have the bits of ``update``, wherever the rows lie."""
  tx = gradcomp.compress(codec, axis_name="data", feedback="error")
  expected = modes.run_with_state("vmap", tx, TREES)
  first = lambda tree: jax.tree.map(lambda x: x[0], tree)
  told = gradcomp.explain(tx, first(TREES[0]), workers=ROWS).bytes_sent
  residuals = jax.tree.leaves(expected.state.residual)
  for place in ("one device", AxisType.Auto, AxisType.Explicit, "in a map"):
    step, state, lay = started(place, codec)
    if place == AxisType.Auto:
      with jax.set_mesh(modes.mesh(ROWS, place)):
        assert_same_bits(state, tx.init(first(TREES[0])))
      assert gradcomp.wire_report(step.lower(lay(TREES[0]), state)).bytes_sent == told
    for tree, output in zip(TREES, expected.outputs, strict=True):
      mean, state = step(lay(tree), state)
      assert_same_bits(mean, first(output))
    kept = zip(jax.tree.leaves(state.residual), residuals, strict=True)
    assert_same_bits([x.reshape(y.shape) for x, y in kept], residuals)


def test_rows_may_lie_on_any_axis():
  """The mean is as if they were on the first, on a mesh, too."""
  axis = -1
  tree = {"w": TREES[0]["w"][:, :64], "rest": (TREES[0]["rest"][0],)}
  turned = jax.tree.map(lambda x: np.moveaxis(x, 0, axis), tree)
  coded = functools.partial(gradcomp.mean_over, codec=QSGD4)
  mean = jax.jit(coded, static_argnames=("axis", "mesh_axis"))
  key = jax.random.key(1)
  expected = mean(tree, key=key)
  assert_same_bits(mean(turned, axis=axis, key=key), expected)
  for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = modes.mesh(ROWS, kind)
    place = lambda x, mesh=mesh: put(x, mesh, *[None] * (axis % x.ndim), "data")
    on_mesh = mean(jax.tree.map(place, turned), axis=axis, key=key, mesh_axis="data")
    assert_same_bits(on_mesh, expected)


def test_several_rows_of_a_device_are_one_message():
  """Their mean in their dtype is sent; one row more costs no byte."""
  dtype = jnp.bfloat16
  place = lambda tree: put(tree, modes.mesh(ROWS), "data")
  one = {"w": jnp.asarray(TREES[0]["w"][:, :64], dtype)}
  factors = jnp.asarray([0, 2] * ROWS, dtype)[:, None, None]
  several = {"w": factors * jnp.repeat(one["w"], 2, 0)}  # whose means are exact
  given = {"codec": QSGD4, "key": jax.random.key(2), "mesh_axis": "data"}
  step = jax.jit(lambda x: gradcomp.mean_over(x, **given))
  got = step(place(several))
  assert got["w"].dtype == dtype
  assert_same_bits(got, step(place(one)))
  sent = [gradcomp.wire_report(step.lower(place(x))).bytes_sent for x in (several, one)]
  assert sent[0] == sent[1]


SPECS = {"w": P(None, "model"), "rest": (P(), P())}


@pytest.mark.parametrize(
  "kind, rows, specs",
  [
    (AxisType.Auto, TREES[0], SPECS),
    (AxisType.Auto, TREES[0]["w"], SPECS["w"]),
    *slow((AxisType.Explicit, TREES[0], SPECS)),
  ],
)
def test_shards_of_a_model_are_encoded_where_they_lie(kind, rows, specs):
  """By the specs under Auto axes, and by the types under Explicit ones."""
  mesh = jax.make_mesh((ROWS, 2), ("data", "model"), (kind,) * 2)
  tree = jax.tree.map(lambda x, spec: put(x, mesh, "data", *spec), rows, specs)
  given = {"codec": QSGD4, "mesh_axis": "data"}
  given |= {"param_specs": specs} if kind == AxisType.Auto else {}
  with jax.set_mesh(mesh):
    state = gradcomp.local.mean_state(tree, **given)
  step = jax.jit(lambda x, s: gradcomp.mean_over(x, state=s, **given))
  compiled = step.lower(tree, state).compile()
  assert set(gradcomp.wire_report(compiled).by_axis) == {"data"}
  mean, after = compiled(tree, state)
  found = tree, mean, after.residual
  rows, mean, residual = (jax.tree.leaves(x)[-1] for x in found)  # of "w"
  assert mean.sharding.spec == SPECS["w"]
  sent = rows - residual.reshape(rows.shape)
  # The second stage rounds once more, by up to a step of a bucket with such a maximum.
  step_size = 2 * np.max(np.abs(rows)) / 7
  assert np.max(np.abs(mean - np.mean(sent, 0))) <= step_size


def test_without_a_state_it_is_unbiased():
  codec = QSGD(bits=2, bucket_size=64)
  x = np.random.default_rng(2).standard_normal((ROWS, 2048)).astype(np.float32)
  one = lambda key: gradcomp.mean_over(x, codec=codec, key=key)
  draws = 512
  means = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(5), draws))
  error = np.mean(means, 0, dtype=float) - x.mean(0, dtype=float)
  z = error / (np.std(means, 0, dtype=float) / np.sqrt(draws) + 1e-9)
  # Of 2048 normal numbers one is beyond 5.5 with probability 1e-4.
  assert np.max(np.abs(z)) < 5.5
  # Rows and calls draw different bits: the mean square of z is 1, up to 5 / sqrt(1024).
  assert abs(np.mean(z**2) - 1) < 0.16


def test_rows_that_devices_cannot_share_are_named():
  mesh, given = modes.mesh(ROWS), {"codec": Dense(), "mesh_axis": "data"}
  with jax.set_mesh(mesh), pytest.raises(ValueError, match="4 devices .*got 6 rows"):
    gradcomp.mean_over(np.ones((6, 2), np.float32), **given)
  with pytest.raises(ValueError, match=r"under jax\.set_mesh"):
    gradcomp.local.mean_state(put(np.ones((4, 2)), mesh, "data"), **given)
