"""Rounds of permutations, largest statistics, and the names of collectives."""

import functools
import itertools
import re

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.exchange import collectives
from gradcomp._src.exchange.collectives import largest, rounds, scatter
from gradcomp.codecs import QSGD, Dense, RandomK
from tests.specs import qsgd
from tests.support import laws, modes


@pytest.mark.parametrize("size", [*range(1, 13), 14])
def test_everyone_sends_every_part_to_each_other_once(size):
  """And no two to each other, but for one round of 2, 8 and 12."""
  parts, found = rounds(size)
  workers = range(size)
  sent = [(i, to[i], part[i]) for to, part in found for i in workers]
  pairs = [(i, j) for i in workers for j in workers if i != j]
  assert sorted(sent) == sorted((*pair, k) for pair in pairs for k in range(parts))
  assert all(sorted(to) == list(workers) for to, _ in found)
  mutual = [to for to, _ in found if any(to[j] == i for i, j in enumerate(to))]
  assert len(mutual) == (size in (2, 8, 12))


@pytest.mark.parametrize(
  "processes, size, primitive",
  [(1, 3, "all_to_all"), (2, 2, "all_to_all"), (3, 3, "ppermute")],
)
def test_processes_on_cpus_send_in_rounds(monkeypatch, processes, size, primitive):
  """With two workers there are only pairs, and nothing is gained."""
  monkeypatch.setattr(jax, "process_count", lambda: processes)
  lines = np.arange(size * size * 5).reshape(size, size, 5)
  send = functools.partial(scatter, axis_name="data")
  program = str(jax.make_jaxpr(send, axis_env=[("data", size)])(lines[0]))
  found = {x for x in ("all_to_all", "ppermute") if x in program}
  assert found == {primitive}
  received = jax.jit(jax.vmap(send, axis_name="data"))(jnp.asarray(lines))
  np.testing.assert_array_equal(received, lines.swapaxes(0, 1))


@pytest.mark.parametrize("size", [3, 6])
def test_rounds_stand_for_the_floats_of_one_collective(monkeypatch, size):
  """A worker sends all parts but its own, whatever carries them."""
  x = jax.ShapeDtypeStruct((size * 96,), jnp.float32)
  given = dict(axis_name="data", codec=QSGD(bits=4, bucket_size=32, rounding="nearest"))

  def sent():
    for sum_of in (gradcomp.parallel.psum_scatter, gradcomp.parallel.psum):
      traced = lambda x, f=sum_of: f(x, **given)
      found = gradcomp.explain(traced, x, workers={"data": size}).forward
      kinds = {collective.kind for collective in found.collectives}
      yield found.bytes_sent, found.dense_bytes, kinds

  plain = list(sent())
  assert plain[0][1:] == (4 * 96 * (size - 1), {"all-to-all"})
  monkeypatch.setattr(collectives, "over_gloo", lambda: True)
  in_rounds = list(sent())
  assert in_rounds[0][2] == {"collective-permute"}
  assert [x[:2] for x in in_rounds] == [x[:2] for x in plain]


def test_the_largest_statistics_and_nan_wins():
  """Over all orders of what a scale can be, with NaN of both signs."""
  nans = np.array([0x7FC00000, 0xFFC00001], np.uint32).view(np.float32)
  kinds = np.array([0, 2.0**-96, 1, 3.4e38, *nans], np.float32)
  stats = np.array(list(itertools.product(kinds, repeat=3))).T  # float32[3, 6^3]
  places = dict(mesh=modes.mesh(3), in_specs=P("data"), out_specs=P())
  find = jax.shard_map(lambda x: largest(x[0], "data"), **places)
  got = np.asarray(jax.jit(find)(stats))
  np.testing.assert_array_equal(got, np.max(stats, axis=0))
  assert np.isnan(got[np.isnan(stats).any(axis=0)]).all()
  (read,) = qsgd.split_stats(got.view(np.int32), [216 * 32], bits=4, bucket_size=32)
  np.testing.assert_array_equal(read.ravel(), got)


PARAMS = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
COLLECTIVES = ("psum", "pmax", "all_gather", "all_to_all", "ppermute")


def equations(jaxpr, outside=""):
  """The names of all primitives, each with its scopes."""
  for equation in jaxpr.eqns:
    scopes = f"{outside}/{equation.source_info.name_stack}"
    yield equation.primitive.name, scopes
    for inner in jax.extend.core.jaxprs_in_params(equation.params):
      yield from equations(inner, scopes)


def traced(tx, like=PARAMS):
  """What an update of four workers does."""
  return list(equations(modes.traced(tx, like, 4).jaxpr.jaxpr))


def sent(tx, like=PARAMS):
  """The scopes of its collectives."""
  return [x for name, x in traced(tx, like) if name.startswith(COLLECTIVES)]


@pytest.mark.parametrize("exchange", ["two_shot", "ring", "hierarchical"])
def test_every_stage_has_its_name(exchange):
  tx = laws.compressed(QSGD(bits=4), exchange, "error", min_leaf_size=0)
  found = set(re.findall(r"gradcomp_\w+", " ".join(scopes for _, scopes in traced(tx))))
  stages = ("correct", "encode", exchange, "decode", "residual")
  assert found.issuperset(f"gradcomp_{name}" for name in stages)


def test_collectives_keep_the_names_that_reports_read():
  """One completes the mean, and the other is a stage, both inside the exchange's."""
  found = sent(gradcomp.qsgd(axis_name="data", exchange="two_shot"))
  assert len(found) == 2 and all("gradcomp_two_shot" in scopes for scopes in found)
  assert ["gradcomp_stage" in scopes for scopes in found] == [True, False]
  assert ["gradcomp_mean_4096_over_4" in scopes for scopes in found] == [False, True]


def test_one_array_of_a_message_has_the_name_of_its_mean():
  """However many arrays are summed, and XLA makes one sum of these or several."""
  rules = [("w", RandomK(density=0.1)), ("", Dense())]
  like = {"v": (64, 64), "w": (64, 64), "x": (4096,), "y": (1,)}
  like = {name: jax.ShapeDtypeStruct(x, jnp.float32) for name, x in like.items()}
  tx = gradcomp.policy(rules, axis_name="data", exchange="psum", message_bytes=None)
  found = sent(tx, like)
  names = [x for x in found if "gradcomp_mean" in x]
  assert len(names) == 1 and "gradcomp_mean_12289_over_4" in names[0]
  assert all("gradcomp_stage" in x for x in found if x not in names)
