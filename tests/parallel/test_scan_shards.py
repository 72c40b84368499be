"""Layers of FSDP in a loop are gathered ahead, to the bit as by a gather in turn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp import parallel
from gradcomp._src.kernels.common.threefry import fold_key, key_words
from gradcomp.codecs import QSGD, EightBit, OneBit
from tests.plugins.slow_cases import slow
from tests.support.assertions import assert_same_bits, says
from tests.support.cases.parallel import mapped
from tests.support.cases.scan import KEY, ROWS, WIDTH, body, loss_of, whole
from tests.support.cases.shards import cut, layers_of, mesh_of, old_of

N = 4
EIGHT = EightBit(dtype="linear", bucket_size=32)
RANDOM = QSGD(bits=4, bucket_size=32)
CODED = dict(params=EIGHT, grads=RANDOM)


def ahead(x, shards, residual, codecs):
  return parallel.scan_shards(
    body, x, shards, axis_name="data", residual=residual, key=KEY, **codecs
  )


def in_turn(x, shards, residual, codecs):
  """The same, with a gather of each array in the loop."""

  @jax.checkpoint
  def layer(x, given):
    number, shards, residual = given
    own = fold_key(key_words(KEY), number)
    named = sorted(shards)
    every = {}
    for i, name in enumerate(named):
      key = jax.random.wrap_key_data(fold_key(own, i), impl="threefry2x32")
      left = None if residual is None else residual[name]
      options = dict(axis_name="data", residual=left, key=key, **codecs)
      every[name] = parallel.gather(shards[name], **options)
    return body(x, every)

  numbers = jnp.arange(len(shards["b"]), dtype=jnp.int32)
  return lax.scan(layer, x, (numbers, shards, residual))


def grads(scan, codecs, keeps):
  def run(x, weights, shards):
    old = old_of(shards) if keeps else None
    loss = lambda x, *given: loss_of(lambda x: scan(x, *given, codecs), x, weights)
    return scan(x, shards, old, codecs), jax.grad(loss, (0, 1, 2))(x, shards, old)

  return run


CASES = [
  ("vmap", 4, True, CODED),
  ("shard_map", 3, False, CODED),
  *slow(
    ("shard_map", 4, True, CODED),
    ("shard_map_unchecked", 2, True, CODED),
    ("pmap", 1, True, CODED),
    ("vmap", 3, True, dict(params=None, grads=OneBit(bucket_size=32))),
    ("vmap", 3, False, dict(params=None, grads=None)),
  ),
]


@pytest.mark.parametrize("mode, length, keeps, codecs", CASES)
def test_values_and_gradients_are_those_of_a_gather_in_the_loop(
  mode, length, keeps, codecs
):
  x = whole(N, ROWS, WIDTH, seed=5)
  weights = whole(N, length, WIDTH, seed=6)
  both = lambda *given: [
    grads(scan, codecs, keeps)(*given) for scan in (ahead, in_turn)
  ]
  got, want = mapped(mode, both, N)(x, weights, cut(layers_of(length), N))
  assert_same_bits(got, want)
  assert all(np.asarray(x).any() for x in jax.tree.leaves(got))


@pytest.mark.parametrize("dtype", slow(jnp.bfloat16))
def test_shards_of_half_precision(dtype):
  """What the cast of a sum loses joins the residual."""
  x, weights = whole(N, ROWS, WIDTH, seed=5).astype(dtype), whole(N, 3, WIDTH, seed=6)
  both = lambda *given: [grads(scan, CODED, True)(*given) for scan in (ahead, in_turn)]
  got, want = mapped("vmap", both, N)(x, weights, cut(layers_of(3, dtype), N))
  assert_same_bits(got, want)


def test_of_two_gathers_of_the_last_layer_one_is_left_out():
  x, weights, length = whole(N, ROWS, WIDTH), whole(N, 5, WIDTH), 5

  def sent(scan, kind):
    def run(x, weights, shards):
      loss = lambda w: loss_of(lambda x: scan(x, w, None, CODED), x, weights)
      return jax.grad(loss)(shards)

    program = mapped("shard_map", run, N)
    report = gradcomp.wire_report(
      program.lower(x, weights, cut(layers_of(length), N)).compile()
    )
    return sum(c.times * c.bytes_sent for c in report.collectives if c.kind == kind)

  assert sent(ahead, "all-gather") * 10 == sent(in_turn, "all-gather") * 9 > 0
  assert sent(ahead, "all-to-all") == sent(in_turn, "all-to-all") > 0


@pytest.mark.parametrize("codec", [RANDOM, *slow(OneBit(bucket_size=32), None)])
def test_what_came_and_what_is_kept_are_what_was_given(codec):
  """The gradients are those of ``lax.scan``, which nothing encodes."""
  x, weights = whole(N, ROWS, WIDTH, seed=5), whole(N, 3, WIDTH, seed=6)
  layers = layers_of(3)  # which eight bits hold

  def run(x, weights, shards):
    old = old_of(shards)
    loss = lambda scan: lambda w, *e: loss_of(lambda x: scan(x, w, *e), x, weights)
    coded = lambda *given: ahead(*given, dict(params=EIGHT, grads=codec))
    found = jax.grad(loss(coded), (0, 1))(shards, old)
    plain = jax.grad(loss(lambda x, w: lax.scan(body, x, w)))(layers)
    return *found, plain, old

  step = mapped("vmap", run, N)
  found = jax.tree.map(np.asarray, step(x, weights, cut(layers, N)))
  for rows, new, grads, old in zip(*map(jax.tree.leaves, found), strict=True):
    came = np.concatenate(rows, axis=1).astype(np.float64)
    left, given = (np.sum(x, 0, dtype=np.float64) for x in (new, old))
    want = np.sum(grads, 0, dtype=np.float64) + given
    # Sums of four up to 2**8 in float32, and the residual of each worker.
    np.testing.assert_allclose(came + left, want, rtol=0, atol=2**-14)


@pytest.mark.parametrize("given", ["equal", "of one half"])
def test_a_residual_that_jax_would_add_up_is_refused(given):
  """It is typed as equal on all workers, or over an axis over which shards differ."""
  layer = lambda x, w: (x @ w, None)
  run = lambda x, w, e: parallel.scan_shards(
    layer, x, w, axis_name="data", params=None, grads=None, residual=e
  )[0]
  specs = {"equal": (P("model"), "data"), "of one half": (P("data"), "model")}
  spec, missing = specs[given]
  every = P(("data", "model"))
  step = jax.shard_map(
    run,
    mesh=mesh_of(dict(data=2, model=2)),
    in_specs=(every, P(None, ("data", "model")), spec),
    out_specs=every,
  )
  shapes = jnp.ones((8, 4)), jnp.ones((3, 8, 4)), jnp.ones((6, 4, 4))
  with pytest.raises(
    ValueError, match=says("`residual`", f"['{missing}']", "in_specs")
  ):
    jax.eval_shape(step, *shapes)


def test_bad_arguments_are_named():
  shards = jnp.ones((N, 3, 8, 2))
  layer = lambda x, w: (x @ w, None)
  plain = dict(axis_name="data", params=None, grads=None, axis=1)
  for options, words in (
    (dict(grads=RANDOM), ["`key`", "QSGD"]),
    (dict(grads=OneBit()), ["`grads`", "`residual` is None"]),
    (dict(axis=2), ["`axis`", "2 axes"]),
    (
      dict(residual=jnp.zeros((3, 8, 2))),
      ["`residual`", "(3, 8, 8)", "gather_residual"],
    ),
  ):
    run = lambda w, options=options: parallel.scan_shards(
      layer, jnp.ones((2, 8)), w, **(plain | options)
    )
    with pytest.raises(ValueError, match=says(*words)):
      jax.eval_shape(jax.vmap(run, axis_name="data"), shards)
