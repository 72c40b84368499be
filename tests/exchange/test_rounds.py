"""The rounds of permutations that bring a line from each worker to each other one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp
from gradcomp._src.exchange import collectives
from gradcomp._src.exchange.collectives import rounds, scatter, scatter_within


@pytest.mark.parametrize("size", range(1, 13))
def test_everyone_sends_every_part_to_each_other_once(size):
  parts, found = rounds(size)
  workers = range(size)
  sent = [(i, to[i], part[i]) for to, part in found for i in workers]
  pairs = [(i, j) for i in workers for j in workers if i != j]
  assert sorted(sent) == sorted((*pair, k) for pair in pairs for k in range(parts))
  assert all(sorted(x.to) == list(workers) for x in found)


@pytest.mark.parametrize("size", [3, 4, 5, 6, 7, 10, 14])
def test_no_two_workers_send_to_each_other(size):
  assert not any(x.to[j] == i for x in rounds(size)[1] for i, j in enumerate(x.to))


@pytest.mark.parametrize("size", [8, 12])
def test_one_round_has_pairs(size):
  pairs = [x for x in rounds(size)[1] if any(x.to[j] == i for i, j in enumerate(x.to))]
  assert len(pairs) == 1


@pytest.mark.bits
@pytest.mark.parametrize(
  "groups, size, words", [(1, 2, 3), (1, 4, 7), (2, 4, 2), (2, 3, 1)]
)
def test_lines_come_from_each_member(groups, size, words):
  """Groups are interleaved, so that a worker's place is not its number."""
  workers = groups * size
  members = [range(g, workers, groups) for g in range(groups)]
  lines = np.arange(workers * size * words).reshape(workers, size, words)
  send = functools.partial(scatter_within, axis_name="data", members=members)
  received = jax.jit(jax.vmap(send, axis_name="data"))(jnp.asarray(lines))
  for group in members:
    for i, worker in enumerate(group):
      np.testing.assert_array_equal(received[worker], lines[list(group), i])


@pytest.mark.parametrize(
  "processes, size, primitive",
  [(1, 3, "all_to_all"), (2, 2, "all_to_all"), (3, 3, "ppermute")],
)
def test_processes_on_cpus_send_in_rounds(monkeypatch, processes, size, primitive):
  """With two workers there are only pairs, and nothing is gained."""
  monkeypatch.setattr(jax, "process_count", lambda: processes)
  lines = np.arange(size * size * 5).reshape(size, size, 5)
  send = jax.vmap(functools.partial(scatter, axis_name="data"), axis_name="data")
  whole = jax.make_jaxpr(
    functools.partial(scatter, axis_name="data"), axis_env=[("data", size)]
  )(lines[0])
  others = {"all_to_all", "ppermute"} - {primitive}
  assert primitive in str(whole)
  assert not any(other in str(whole) for other in others)
  received = jax.jit(send)(jnp.asarray(lines))
  np.testing.assert_array_equal(received, lines.swapaxes(0, 1))


@pytest.mark.parametrize("size", [3, 4, 6])
def test_rounds_stand_for_the_floats_of_one_collective(monkeypatch, size):
  """A worker sends all parts but its own, whatever carries them."""
  x = jax.ShapeDtypeStruct((size * 96,), jnp.float32)
  codec = gradcomp.codecs.QSGD(bits=4, bucket_size=32, rounding="nearest")

  def sent(function):
    found = gradcomp.wire.trace_wire(function, x, workers={"data": size}).forward
    kinds = {collective.kind for collective in found.collectives}
    return found.bytes_sent, found.dense_bytes, kinds

  scatter_sum = lambda x: gradcomp.parallel.psum_scatter(
    x, axis_name="data", codec=codec
  )
  total = lambda x: gradcomp.parallel.psum(x, axis_name="data", codec=codec)
  plain = [sent(function) for function in (scatter_sum, total)]
  assert plain[0][1] == 4 * 96 * (size - 1)
  assert plain[0][2] == {"all-to-all"}
  monkeypatch.setattr(collectives, "_over_gloo", lambda: True)
  rounds_of = [sent(function) for function in (scatter_sum, total)]
  assert rounds_of[0][2] == {"collective-permute"}
  assert [x[:2] for x in rounds_of] == [x[:2] for x in plain]
