"""Arrays change their sharding as by jax.reshard, in words, and with a residual."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.mesh.shard_maps import unreduce
from gradcomp.codecs import QSGD, Dense, EightBit
from gradcomp.parallel import reshard
from tests.plugins.slow_cases import slow
from tests.support.assertions import assert_same_bits
from tests.support.cases.parallel import mapped, numbers
from tests.support.cases.steps import explicit_mesh

N = 4
EIGHT = EightBit(bucket_size=32)
RANDOM = QSGD(bits=4, bucket_size=32)
KEY = jax.random.key(5)
ADDENDS = P(unreduced={"data"})
dense = functools.partial(reshard, codec=Dense())


@pytest.fixture
def mesh():
  with jax.set_mesh(explicit_mesh()):
    yield


def put(x, *spec):
  return jax.device_put(x, NamedSharding(jax.sharding.get_mesh(), P(*spec)))


def in_words(program, *arguments):
  """What a program returns; and it moves no float, nor anything but words."""
  compiled = program.lower(*arguments).compile()
  report = gradcomp.wire_report(compiled)
  assert report.collectives and {c.dtype for c in report.collectives} == {"u32"}
  return compiled(*arguments)


def test_each_way_on_explicit_axes(mesh):
  """A scalar, a prime, and matrices; of float32 the sums and the wholes are exact."""
  matrix, vector, scalar = numbers(N, 8, 12), numbers(N, 7), numbers(N)

  @jax.jit
  def every(*given):
    matrix, *_ = given = [unreduce(x, "data") for x in given]
    rows, columns = dense(matrix, P("data")), dense(matrix, P(None, "data"))
    back = dense(rows, P()), dense(columns, axis_name="data")
    reduced = dense(columns, P(reduced={"data"}))
    kinds = [jax.typeof(x).sharding.spec for x in (rows, columns, back[1], reduced)]
    assert kinds[:2] == [P("data", None), P(None, "data")]
    assert kinds[2:] == [P(None, None), P(None, None, reduced={"data"})]
    return [dense(x, axis_name="data") for x in given], [rows, columns, *back]

  total, others = in_words(every, *(put(x, "data") for x in (matrix, vector, scalar)))
  for got, x in zip(total, (matrix, vector, scalar), strict=True):
    np.testing.assert_allclose(got, x.sum(0), rtol=1e-6, atol=1e-6)
  for got in others:
    assert_same_bits(np.asarray(got), np.asarray(total[0]))


@pytest.mark.parametrize("way", ["sum", "scatter", "gather"])
@pytest.mark.parametrize("codec", [RANDOM, *slow(EIGHT)], ids=["qsgd", "eight_bit"])
def test_residuals_send_later_what_was_lost(way, codec, mesh):
  """What came, and what is still to be sent, are the sum of all that was given."""
  x = numbers(3, N, 8, 40)
  x[2, 1, 5, 5] = np.nan if way == "scatter" else 0.0
  gather = way == "gather"
  target = P("data") if way == "scatter" else P()
  residual = put(np.zeros((8, 40) if gather else (N * 8, 40), np.float32), "data")

  @jax.jit
  def step(x, residual, key):
    given = jax.reshard(x[0], P("data")) if gather else unreduce(x, "data")
    return reshard(given, target, codec=codec, key=key, residual=residual)

  got, place = 0, None if gather else "data"
  sent = gradcomp.wire_report(step.lower(put(x[0], place), residual, KEY)).collectives
  assert len(sent) == {"sum": 2}.get(way, 1)  # a residual sends nothing more
  for number in range(2):
    given = put(x[number], place), residual, jax.random.fold_in(KEY, number)
    out, residual = step(*given)
    got = got + np.asarray(out)
  left = np.asarray(residual).reshape(-1, 8, 40).sum(0)
  want = x[:2, 0].sum(0) if gather else x[:2].sum((0, 1))
  assert np.abs(left).max() > 0.01
  np.testing.assert_allclose(got + left, want, rtol=1e-5, atol=1e-5)
  if way == "scatter":
    each = np.asarray(residual).reshape(N, N, 2, 40)
    assert not any(each[i, i].any() for i in range(N))  # owners' parts are exact
    # A NaN is seen, and stays out of residuals.
    out, after = step(put(x[2], "data"), residual, KEY)
    assert np.isnan(np.asarray(out)[5]).any() and np.isfinite(after).all()


def test_gradients_go_the_way_back(mesh):
  """Those of addends are whole, and those of what is reduced are addends."""
  a, b, w = numbers(8, 16), numbers(16, 12, seed=1), numbers(8, 12, seed=2)

  def of_sum(a, b, target):
    addends = jnp.einsum("ij,jk->ik", a, b, out_sharding=ADDENDS)
    return jnp.sum(jax.reshard(w, target) * dense(addends, target))

  for target in (P(), P("data")):
    loss = lambda a, b, target=target: of_sum(a, b, target)
    got = jax.jit(jax.grad(loss))(put(a, None, "data"), put(b, "data"))
    np.testing.assert_allclose(got, w @ b.T, rtol=1e-5, atol=1e-5)

  def of_shards(b, target):
    return jnp.sum(jnp.sin(jax.reshard(a, P("data")) @ dense(b, target)))

  @jax.jit
  def both(b):
    grad = jax.grad(of_shards)
    return grad(b, P(reduced={"data"})), grad(b, P())

  shards = put(b, "data")
  for got in both(shards):
    np.testing.assert_allclose(got, a.T @ np.cos(a @ b), rtol=1e-5, atol=1e-5)
  in_words(jax.jit(jax.grad(lambda b: of_shards(b, P(reduced={"data"})))), shards)


@pytest.mark.parametrize("mode", ["shard_map", "vmap"])
def test_inside_a_map_the_source_is_said(mode):
  x = numbers(N, 8, 12)

  def function(x):
    total, rows = dense(x, axis_name="data"), dense(x, P("data"))
    again, left = reshard(x, axis_name="data", codec=EIGHT, residual=jnp.zeros_like(x))
    return total, dense(rows, P(), source=P("data")), again, left

  total, whole, again, left = mapped(mode, function, N)(x)
  assert_same_bits(total, whole)
  np.testing.assert_allclose(total[0], x.sum(0), rtol=1e-6, atol=1e-6)
  np.testing.assert_allclose(again[3] + left.sum(0), x.sum(0), rtol=1e-5, atol=1e-5)


def test_one_of_two_axes_of_a_mesh_and_both():
  mesh, x = explicit_mesh((2, 2), ("host", "chip")), numbers(8, 12)

  @jax.jit
  def every(both, one):
    assert jax.typeof(one).sharding.spec == P("host", "chip")
    whole = dense(both, axis_name=("host", "chip"))
    return whole, dense(one, axis_name="host"), dense(one, P("host"))

  with jax.set_mesh(mesh):
    for array in in_words(every, put(x, ("host", "chip")), put(x, "host", "chip")):
      assert_same_bits(np.asarray(array), x)
