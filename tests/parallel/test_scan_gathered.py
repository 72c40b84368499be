"""Words of layers that a host keeps, so that the backward pass asks no other host."""

import collections

import jax
import pytest

from gradcomp import parallel
from gradcomp._src.kernels.common.threefry import key_words
from gradcomp._src.parallel.options import Wire
from gradcomp._src.parallel.scan_gathered import Gathered
from gradcomp.codecs import QSGD, Dense
from tests.parallel import table_scans
from tests.plugins.slow_cases import slow
from tests.support.assertions import assert_same_bits, says
from tests.support.cases.parallel import mapped_over, nbytes, numbers
from tests.support.cases.scan import KEY, ROWS, WIDTH, body

(ROW,) = (row for row in table_scans.rows(table_scans.TABLE) if row.door == "copy")
N, CHIPS = ROW.workers, 2
WEIGHTS, GRADS = ROW.options["params"], ROW.options["grads"]


def payload(codec):
  """The bytes of a worker's shards of one layer."""
  return sum(nbytes(codec, size) for size in (WIDTH // N, WIDTH * WIDTH // N))


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
