"""Sharded layers train as whole ones, and send no more than they should."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp
from examples.lib.sharded.sub_batches import sub_batches
from gradcomp import parallel
from gradcomp.codecs import QSGD, Dense, EightBit
from tests.plugins.slow_cases import slow
from tests.support.cases.parallel import CODECS, mapped, nbytes, numbers

N = 4
EIGHT = EightBit(bucket_size=64)


SIZES = (12, 16, 8, 4)


def weights():
  return [
    numbers(m, n, seed=i) / np.float32(m**0.5)
    for i, (m, n) in enumerate(itertools.pairwise(SIZES))
  ]


def whole(params, x):
  for w in params:
    x = jnp.tanh(x @ w)
  return jnp.mean(x**2)


def by_outputs(params, x, codec):
  """Each worker has columns of each matrix, and gathers what the next one needs."""
  for w in params:
    x = jnp.tanh(parallel.sum_gradients(x, axis_name="data", codec=codec) @ w)
    x = parallel.all_gather(
      x, axis_name="data", codec=codec, axis=1, own="coded", to="invarying"
    )
  return jnp.mean(x**2)


def by_both(params, x, codec):
  """Columns, then rows, whose products add up: one sum in each direction."""
  first, second, _ = params
  x = jnp.tanh(parallel.sum_gradients(x, axis_name="data", codec=codec) @ first)
  return jnp.mean(
    jnp.tanh(parallel.psum(x @ second, axis_name="data", codec=codec)) ** 2
  )


def by_shares(params, x, codec):
  """As by_outputs, but cotangents stay per worker: each has a share of the loss."""
  for w in params:
    y = jnp.tanh(x @ w)
    x = parallel.all_gather(y, axis_name="data", codec=codec, axis=1)
  return jnp.mean(x**2) / N


def columns(w):
  return np.stack(np.split(w, N, axis=1))


@pytest.mark.parametrize(
  "mode", ["shard_map", "vmap", *slow("shard_map_unchecked", "pmap")]
)
@pytest.mark.parametrize("model, share", [(by_outputs, 1), (by_shares, N)])
def test_layers_cut_by_outputs_have_the_gradients_of_whole_ones(model, share, mode):
  params, x = weights(), numbers(8, 12, seed=9)
  loss = lambda params: model(params, jnp.asarray(x), Dense())
  value, grads = mapped(mode, jax.value_and_grad(loss), N)([*map(columns, params)])
  expected, cut = jax.value_and_grad(whole)(params, x)
  np.testing.assert_allclose(value, [expected / share] * N, rtol=1e-5)
  for got, want in zip(grads, map(columns, map(np.asarray, cut)), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


def test_a_pair_of_layers_sends_one_sum_in_each_direction():
  params, x = weights(), numbers(8, 12, seed=9)
  cut = [columns(params[0]), np.stack(np.split(params[1], N)), columns(params[2])]

  def grad(params):
    return jax.grad(lambda params, x: by_both(params, x, Dense()), (0, 1))(
      params, jnp.asarray(x)
    )

  program = mapped("shard_map", grad, N)
  (first, second, _), dx = program(cut)
  want, dx_want = jax.grad(lambda p, x: whole(p[:2], x), (0, 1))(params, x)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
  close(first, columns(np.asarray(want[0])))
  close(second, np.stack(np.split(np.asarray(want[1]), N)))
  close(dx, np.stack([dx_want] * N))
  report = gradcomp.wire_report(program.lower(cut).compile())
  kinds = [c.kind for c in report.collectives]
  assert kinds == ["all-to-all", "all-gather"] * 2


@pytest.mark.parametrize("mode", ["shard_map", *slow("vmap")])
def test_passes_have_equal_gradients(mode):
  """Of the weights and of the features, with and without fetching ahead."""
  params, x = columns(weights()[0]), numbers(N, 8, 12, seed=9)

  def grads(w, x):
    def loss(w, x, passes, prefetch):
      layer = lambda x, s: jnp.sum(jnp.tanh(x @ w) ** 2)
      options = dict(axis_name="data", codec=Dense())
      sums = sub_batches(layer, x, passes=passes, prefetch=prefetch, **options)
      assert sums.shape == (passes,)
      return jnp.sum(sums)

    cases = [(1, True), (2, True), (4, True), (4, False)]
    return [jax.grad(loss, (0, 1))(w, x, *case) for case in cases]

  first, *others = mapped(mode, grads, N)(params, x)
  each = x.reshape(N * 8, 12)
  want = jax.grad(lambda x: jnp.sum(jnp.tanh(x @ weights()[0]) ** 2))(each)
  np.testing.assert_allclose(first[1], want.reshape(x.shape), rtol=1e-5, atol=1e-5)
  for other in others:
    for got, want in zip(other, first, strict=True):
      np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_the_sub_batches_are_those_that_the_page_says():
  x = np.arange(N * 4, dtype=np.float32).reshape(N, 4)

  def passes(x):
    keep = lambda batch, s: (batch, s)
    options = dict(axis_name="data", codec=Dense())
    return sub_batches(keep, x, passes=2, **options)

  batches, numbers = mapped("vmap", passes, N)(x)
  assert batches[1].tolist() == [
    [0, 1, 4, 5, 8, 9, 12, 13],
    [2, 3, 6, 7, 10, 11, 14, 15],
  ]
  assert numbers[0].tolist() == [0, 1]


def needs(body):
  """What each instruction of a computation needs, directly or not, by their names."""
  found = {}
  for line in body.splitlines()[1:]:
    if match := re.match(r"\s+(?:ROOT )?(%\S+) = ", line):
      operands = re.findall(r"%[\w.-]+", line[match.end() :].split(", metadata")[0])
      each = (found.get(name, {name}) for name in operands)
      found[match[1]] = {match[1]}.union(*each)
  return found


@pytest.mark.parametrize("prefetch", [True, False])
def test_the_next_sub_batch_is_gathered_under_the_product(prefetch):
  """In the loop of the optimized program neither of the two waits for the other."""
  x, w = numbers(N, 32, 64), numbers(N, 64, 64)

  def layer(w, x):
    options = dict(axis_name="data", passes=4, codec=EIGHT, prefetch=prefetch)
    return sub_batches(lambda x, s: x @ w, x, **options)

  text = mapped("shard_map", layer, N).lower(w, x).compile().as_text()
  loops = [part for part in text.split("\n\n") if " all-gather(" in part]
  (body,) = [part for part in loops if "ENTRY" not in part]
  # The first one stands before the loop.
  assert text.count(" all-gather(") == len(loops) == 1 + prefetch

  def named(pattern):
    lines = [line for line in body.splitlines() if re.search(pattern, line)]
    return {re.search(r"%[\w.-]+", line)[0] for line in lines}

  (gather,) = named(r" all-gather\(")
  (product,) = named(r'/dot_general"')
  found = needs(body)
  assert (gather in found[product]) != prefetch
  assert product not in found[gather]


def test_what_is_sent_are_words_and_as_many_as_the_payloads_have():
  x, long = numbers(N, 5000), numbers(N, 5000 * N)
  qsgd = QSGD(bits=4, bucket_size=64)
  key = jax.random.key(1)

  def function(x, long):
    gather = lambda x: parallel.all_gather(
      x, axis_name="data", codec=EIGHT, backward=qsgd, key=key
    )
    y, back = jax.vjp(gather, x)
    total = parallel.psum(x.astype(jnp.float16), axis_name="data", codec=EIGHT)
    swapped = parallel.all_to_all(
      long, axis_name="data", split_axis=0, concat_axis=0, codec=qsgd, key=key
    )
    sent = parallel.ppermute(x, axis_name="data", perm=[(0, 1)], codec=EIGHT)
    scales = parallel.all_gather(x, axis_name="data", codec=CODECS["ternary"], key=key)
    return back(long), total, swapped, sent, y, scales

  compiled = mapped("shard_map", function, N).lower(x, long).compile()
  report = gradcomp.wire_report(compiled)
  assert {c.dtype for c in report.collectives} <= {"u32", "u8"}
  share = (N - 1) / N
  a_quarter = 2 * share * N * nbytes(EIGHT, 1250)
  once = nbytes(EIGHT, 5000)
  shared = nbytes(CODECS["ternary"], 5000) + 4
  expected = {
    "all-gather": (N - 1) * (once + shared) + a_quarter / 2,
    "all-to-all": 2 * share * N * nbytes(qsgd, 5000) + a_quarter / 2,
    "collective-permute": once,
  }
  assert {c.kind for c in report.collectives} == set(expected)
  for kind, want in expected.items():
    found = [c for c in report.collectives if c.kind == kind]
    assert abs(sum(c.bytes_sent for c in found) / want - 1) < 0.01, kind
  plain = 4 * 5000 * ((N - 1) * 2 + 2 * share * N + 2 * share + 1)
  assert report.dense_bytes == plain  # the same in float32
