"""Words of layers that a host keeps, so that the backward pass asks no other host."""

import collections

import jax
import numpy as np
import pytest

import gradcomp
from gradcomp import parallel
from gradcomp._src.kernels.common.threefry import key_words
from gradcomp._src.parallel.options import Wire
from gradcomp._src.parallel.scan_gathered import Gathered
from gradcomp.codecs import QSGD, Dense, EightBit
from tests.plugins.slow_cases import slow
from tests.support.assertions import assert_same_bits, says
from tests.support.cases.parallel import nbytes, numbers
from tests.support.cases.scan import KEY, ROWS, WIDTH, body, loss_of, whole
from tests.support.cases.shards import cut, layers_of, mapped_over, mesh_of, old_of

BOTH = ("host", "chip")
GRADS = QSGD(bits=4, bucket_size=32)
# At random to -1, 0 or 1 times the largest: with the same draws, to the same bits.
COARSE = QSGD(bits=2, bucket_size=32)


def scanned(x, shards, residual, *, params, inner="chip", axes=BOTH):
  codecs = dict(params=params, grads=GRADS, key=KEY)
  options = dict(axis_name=axes, backward_axis_name=inner, residual=residual)
  return parallel.scan_shards(body, x, shards, **options, **codecs)


def gradients(x, weights, shards, *, keeps, **options):
  old = old_of(shards, options.get("axes", BOTH)) if keeps else None
  loss = lambda *given: loss_of(lambda x: scanned(x, *given, **options), x, weights)
  return jax.grad(loss, (0, 1))(shards, old)


def arrays(workers, length):
  halves = jax.tree.map(lambda x: np.float32(x / 2), layers_of(length))
  halves["w"][:, 0] = 1.0
  given = whole(workers, ROWS, WIDTH, seed=5), whole(workers, length, WIDTH, seed=6)
  return *given, cut(halves, workers)


CASES = [
  (dict(host=2, chip=2), "chip", 4, COARSE, True),
  *slow(
    (dict(host=2, chip=4), "host", 3, COARSE, True),
    (dict(host=2, chip=2), ("chip",), 1, COARSE, True),
    (dict(host=4, chip=2), "chip", 2, EightBit(bucket_size=32), False),
    (dict(pod=2, host=2, chip=2), ("host", "chip"), 3, None, True),
  ),
]


@pytest.mark.parametrize("check_vma", [True, *slow(False)])
@pytest.mark.parametrize("axes, inner, length, params, keeps", CASES)
def test_gradients_are_those_without_the_copy(
  axes, inner, length, params, keeps, check_vma
):
  def both(x, weights, shards):
    way = dict(keeps=keeps, params=params, axes=tuple(axes))
    given = x, weights, shards
    return [gradients(*given, inner=inner, **way) for inner in (inner, None)]

  workers = np.prod([*axes.values()])
  run = mapped_over(axes, both, check_vma=check_vma)
  got, want = run(*arrays(workers, length))
  assert_same_bits(got, want)
  assert all(np.asarray(x).any() for x in jax.tree.leaves(got))


@pytest.mark.parametrize("inner", ["chip", "host", ("host", "chip")])
@pytest.mark.parametrize("codec", [QSGD(bits=4, bucket_size=32), *slow(Dense())])
def test_the_words_are_those_that_came_in_the_forward_pass(codec, inner):
  axes = dict(pod=2, host=2, chip=2)
  source = Gathered(Wire(tuple(axes), codec, codec, "coded", 8), 0, inner)

  def words(shard):
    asked = source.ask(shard, key_words(KEY))
    kept = source.keep(asked)
    return asked, source.again(shard, kept, None), kept

  # Short lines, and long ones, which are lanes.
  shards = {"a": numbers(8, 3, 4), "b": numbers(8, 64, 1024)}
  asked, again, kept = mapped_over(axes, words)(shards)
  assert_same_bits(again, asked)
  inside = 4 if isinstance(inner, tuple) else 2
  for every, share in zip(asked, kept, strict=True):
    assert every.size == inside * share.size > 0


def test_the_backward_pass_sends_no_weights_between_hosts():
  axes, length = dict(host=2, chip=4), 5
  run = lambda *given: gradients(*given, keeps=False, params=EightBit(bucket_size=32))
  program = mapped_over(axes, run).lower(*arrays(8, length)).compile()
  parts = gradcomp.wire_report(program, mesh=mesh_of(axes)).by_axis
  sent = collections.Counter()
  for axis, part in parts.items():
    for x in part.collectives:
      sent[axis, x.kind] += x.times * x.bytes_sent
  shards = (WIDTH // 8, WIDTH * WIDTH // 8)
  weights, grads = (
    sum(nbytes(codec, size) for size in shards)
    for codec in (EightBit(bucket_size=32), GRADS)
  )
  assert sent == {
    ("host,chip", "all-gather"): length * 7 * weights,
    ("host,chip", "all-to-all"): length * 7 * grads,
    ("chip", "all-gather"): (length - 1) * (8 - 8 // 4) * weights,
  }


def test_a_worker_keeps_the_share_of_a_chip():
  """Of all layers but the last, of which the backward pass has all words."""
  axes, length, params = dict(host=2, chip=4), 5, EightBit(bucket_size=32)

  def saved(inner):
    def pull(x, shards):
      run = lambda w: scanned(x, w, None, params=params, inner=inner)
      return jax.tree.leaves(jax.vjp(run, shards)[1])

    x, _, shards = arrays(8, length)
    found = jax.eval_shape(mapped_over(axes, pull), x, shards)
    return sum(x.size * x.dtype.itemsize for x in found) // 8

  payload = sum(nbytes(params, size) for size in (WIDTH // 8, WIDTH * WIDTH // 8))
  assert saved("chip") - saved(None) == (length - 1) * 8 * payload // 4


@pytest.mark.parametrize("inner", ["model", BOTH, (), ("chip", "chip"), 1])
def test_axes_that_are_not_those_of_some_workers_are_refused(inner):
  run = lambda x, w: scanned(x, w, None, params=None, inner=inner)
  words = ["`backward_axis_name`", "('host', 'chip')", str(inner)]
  x, _, shards = arrays(4, 3)
  with pytest.raises(ValueError, match=says(*words)):
    jax.eval_shape(mapped_over(dict(host=2, chip=2), run), x, shards)
