"""Layers that each worker has: their gradients alone go to the owners, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gradcomp
from gradcomp import parallel
from gradcomp._src.kernels.common.threefry import fold_key, key_words
from gradcomp.codecs import QSGD, EightBit, OneBit
from tests.plugins.slow_cases import slow
from tests.support.assertions import assert_same_bits, says
from tests.support.cases.parallel import mapped
from tests.support.cases.scan import KEY, ROWS, WIDTH, body, loss_of, whole
from tests.support.cases.shards import cut, layers_of, old_of

RANDOM = QSGD(bits=4, bucket_size=32)
ALONE = dict(axis_name="data", params=None)


def in_the_loop(x, weights, shards, layers, residual, codec):
  """The values, and the gradients of the input, the shards, and the residual."""
  options = dict(whole=layers, grads=codec, key=KEY, **ALONE)

  def scanned(x, shards, residual):
    return parallel.scan_shards(body, x, shards, residual=residual, **options)

  loss = lambda *given: loss_of(lambda x: scanned(x, *given[1:]), given[0], weights)
  values = scanned(x, shards, residual)
  return values, jax.grad(loss, (0, 1, 2))(x, shards, residual)


def reduced(grad, shard, residual, codec, words):
  """The rows of an array of one layer, and its new residual, in full view."""
  key = lambda words: jax.random.wrap_key_data(words, impl="threefry2x32")
  if residual is None:
    codec, own = codec or gradcomp.codecs.Dense(), key(fold_key(words, 1))
    return parallel.psum_scatter(grad, axis_name="data", codec=codec, key=own), None
  given = dict(grads=codec, key=key(words), **ALONE)
  gather = lambda w, e: parallel.gather(w, residual=e, **given)
  return jax.vjp(gather, shard, residual)[1](grad)


def behind_it(x, weights, shards, layers, residual, codec):
  """The same by ``lax.scan``, and a reduction of each array behind it."""
  own = gradcomp.defer_reduction(layers, axis_name="data")
  scanned = lambda x, layers: lax.scan(body, x, layers)
  loss = lambda x, layers: loss_of(lambda x: scanned(x, layers), x, weights)
  of_x, grads = jax.grad(loss, (0, 1))(x, own)

  def of_layer(given):
    number, grads, shards, residual = given
    rows, kept = {}, None if residual is None else {}
    for i, name in enumerate(sorted(grads)):
      words = fold_key(fold_key(key_words(KEY), number), i)
      old = None if residual is None else residual[name]
      grad = grads[name].astype(jnp.float32)
      rows[name], new = reduced(grad, shards[name], old, codec, words)
      if kept is not None:
        kept[name] = new
    return rows, kept

  numbers = jnp.arange(len(shards["b"]), dtype=jnp.int32)
  rows, kept = lax.map(of_layer, (numbers, grads, shards, residual))
  return scanned(x, own), (of_x, rows, kept)


CASES = [
  ("vmap", 4, 4, True, RANDOM),
  ("shard_map", 8, 3, False, RANDOM),
  *slow(
    ("shard_map", 2, 5, True, RANDOM),
    ("shard_map_unchecked", 4, 4, False, RANDOM),
    ("pmap", 4, 1, True, RANDOM),
    ("vmap", 8, 3, True, OneBit(bucket_size=32)),
    ("vmap", 2, 2, False, None),
  ),
]


def arrays(workers, length):
  given = whole(workers, ROWS, WIDTH, seed=5), whole(workers, length, WIDTH, seed=6)
  return *given, cut(layers_of(length), workers)


@pytest.mark.parametrize("mode, workers, length, keeps, codec", CASES)
@pytest.mark.parametrize("dtype", [np.float32, *slow(jnp.bfloat16)])
def test_owners_get_the_rows_of_a_reduction_behind_the_loop(
  mode, workers, length, keeps, codec, dtype
):
  """Of layers of any float dtype; rows and residuals have that of the shards."""
  layers = layers_of(length, dtype)

  def both(x, weights, shards):
    given = x.astype(dtype), weights, shards, layers, old_of(shards) if keeps else None
    return [way(*given, codec) for way in (in_the_loop, behind_it)]

  got, want = mapped(mode, both, workers)(*arrays(workers, length))
  assert_same_bits(got, want)
  assert all(np.asarray(x).any() for x in jax.tree.leaves(got))
  assert {x.dtype for x in jax.tree.leaves(got[1][1:])} == {np.dtype(np.float32)}


def test_only_gradients_are_sent():
  x, weights, shards = arrays(4, 5)
  layers = layers_of(5)

  def report_of(run):
    program = mapped("shard_map", run, 4).lower(x, weights, shards).compile()
    return gradcomp.wire_report(program)

  run = lambda *given: in_the_loop(*given, layers, None, RANDOM)[1][1]
  report = report_of(run)
  one = lambda name, shape: parallel.psum_scatter(
    jnp.ones(shape), axis_name="data", codec=RANDOM, key=KEY
  )
  of_layer = report_of(lambda *_: [one("b", (WIDTH,)), one("w", (WIDTH, WIDTH))])
  assert {x.kind for x in report.collectives} == {"all-to-all"}
  assert report.bytes_sent == 5 * of_layer.bytes_sent > 0
  assert report.dense_bytes == 5 * of_layer.dense_bytes


def test_whole_layers_are_constant():
  x, weights, shards = arrays(4, 3)
  scan = lambda shards, layers: parallel.scan_shards(
    body, x[0], shards, whole=layers, grads=None, **ALONE
  )
  loss = lambda *given: loss_of(lambda _: scan(*given), x[0], weights[0])
  run = lambda shards: jax.grad(loss, (0, 1))(shards, layers_of(3))
  rows, zeros = jax.vmap(run, axis_name="data")(shards)
  assert all(np.asarray(x).any() for x in jax.tree.leaves(rows))
  assert not any(np.asarray(x).any() for x in jax.tree.leaves(zeros))


GOOD = layers_of(3)
WRONG = {
  "codec": (dict(params=EightBit()), ["`params`", "None with `whole`", "EightBit"]),
  "axis": (dict(backward_axis_name="data"), ["`backward_axis_name`", "'data'"]),
  "shards": (
    dict(whole={k: x[:, ::4] for k, x in GOOD.items()}),
    ["`whole`", "(3, 32, 32)", "(3, 8, 32)", "all_gather"],
  ),
  "tree": (dict(whole=list(GOOD.values())), ["`whole`", "a tree like `shards`"]),
  "lengths": (
    dict(whole=GOOD | {"b": GOOD["b"][:2]}),
    ["`whole`", "the same number in each", "[2, 3]"],
  ),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_arguments_are_named(case):
  options, words = WRONG[case]
  given = ALONE | dict(grads=None, whole=GOOD) | options
  run = lambda x, w: parallel.scan_shards(body, x, w, **given)
  x, _, shards = arrays(4, 3)
  with pytest.raises(ValueError, match=says(*words)):
    jax.eval_shape(jax.vmap(run, axis_name="data"), x, shards)
