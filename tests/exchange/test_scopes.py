"""Profiles name the stages of an update: correct, encode, decode, and the exchange."""

import re

import jax
import jax.extend
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import gradcomp
from tests.plugins.slow_cases import slow
from tests.support import modes

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

  def update(scale):
    grads = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype) * scale[0], like)
    return tx.update(grads, tx.init(grads))[0]

  mapped = jax.shard_map(
    update, mesh=modes.mesh(4), in_specs=P("data"), out_specs=P("data"), check_vma=False
  )
  return list(equations(jax.make_jaxpr(mapped)(jnp.ones(4)).jaxpr))


@pytest.mark.parametrize(
  "exchange", ["two_shot", *slow("all_gather", "ring", "hierarchical", "local")]
)
@pytest.mark.parametrize("codec", ["qsgd", *slow("onebit_sgd")])
def test_every_stage_has_its_name(codec, exchange):
  options = {"qsgd": {"feedback": "error"}}.get(codec, {})
  tx = getattr(gradcomp, codec)(
    axis_name="data", exchange=modes.grouped(exchange), min_leaf_size=0, **options
  )
  found = set(re.findall(r"gradcomp_\w+", " ".join(scopes for _, scopes in traced(tx))))
  stages = ("correct", "encode", exchange, "decode", "residual")
  assert found.issuperset(f"gradcomp_{name}" for name in stages)


def test_collectives_keep_the_names_that_reports_read():
  """One completes the mean, and the other is a stage, both inside the exchange's."""
  found = [
    scopes
    for name, scopes in traced(gradcomp.qsgd(axis_name="data", exchange="two_shot"))
    if name.startswith(COLLECTIVES)
  ]
  assert len(found) == 2 and all("gradcomp_two_shot" in scopes for scopes in found)
  assert [("gradcomp_stage" in scopes) for scopes in found] == [True, False]
  assert ["gradcomp_mean_4096_over_4" in scopes for scopes in found] == [False, True]


@pytest.mark.parametrize("exchange", ["psum", *slow("all_gather")])
def test_one_array_of_a_message_has_the_name_of_its_mean(exchange):
  """However many arrays are summed, and XLA makes one sum of these or several."""
  rules = [("w", gradcomp.codecs.RandomK(density=0.1)), ("", gradcomp.codecs.Dense())]
  like = {"v": (64, 64), "w": (64, 64), "x": (4096,), "y": (1,)}
  like = {name: jax.ShapeDtypeStruct(x, jnp.float32) for name, x in like.items()}
  tx = gradcomp.policy(rules, axis_name="data", exchange=exchange, message_bytes=None)
  sent = [scope for name, scope in traced(tx, like) if name.startswith(COLLECTIVES)]
  names = [x for x in sent if "gradcomp_mean" in x]
  assert len(names) == 1 and "gradcomp_mean_12289_over_4" in names[0]
  assert all("gradcomp_stage" in x for x in sent if x not in names)
