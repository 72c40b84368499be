"""A loss may constrain its activations over the axis of the workers, in any form."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen
from jax import lax
from jax.lax import with_sharding_constraint  # bound before any trace
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from tests.support import modes
from tests.support.assertions import assert_same_bits
from tests.support.cases.steps import OVER, N

FREE = P.UNCONSTRAINED

MESHES = {
  "workers": modes.mesh(N),
  "model": jax.make_mesh((N, 2), ("data", "model"), (AxisType.Auto,) * 2),
}


def logical(x):
  with linen.logical_axis_rules([("batch", "data"), ("wide", None)]):
    return linen.with_logical_constraint(x, ("batch", "wide"), mesh=None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def with_rule(keep, x):
  return keep(jnp.sin(x))


with_rule.defvjp(
  lambda keep, x: (with_rule(keep, x), keep(x)),
  lambda keep, x, g: (keep(g) * jnp.cos(keep(x)),),
)

# Functions of a constraint, or of none, and of an activation.
FORMS = {
  "spec": lambda keep, x: keep(x),
  "scan": lambda keep, x: lax.scan(lambda x, _: (keep(x) * 0.5, None), x, None, 3)[0],
  "cond": lambda keep, x: lax.cond(x.sum() > 0, lambda x: keep(-x), lambda x: x, x),
  "remat": lambda keep, x: jax.checkpoint(lambda x: keep(jnp.sin(x)))(x),
  "vmap": lambda keep, x: jax.vmap(keep, in_axes=1, out_axes=1)(x[:, None])[:, 0],
  "jit": lambda keep, x: jax.jit(lambda x: keep(jnp.cos(x)))(x),
  "custom_vjp": with_rule,
  "mean": lambda keep, x: keep(x - lax.pmean(x, "data")),
}
# Functions of an activation and a mesh.
CONSTRAINTS = {
  "none": lambda x, mesh: x,
  "bare": lambda x, mesh: with_sharding_constraint(x, P("data")),
  "named": lambda x, mesh: lax.with_sharding_constraint(
    x, NamedSharding(mesh, P(("data",)))
  ),
  "free": lambda x, mesh: with_sharding_constraint(
    x, P("data", *[FREE] * (x.ndim - 1))
  ),
  "flax": lambda x, mesh: logical(x) if x.ndim == 2 else x,
}


def grads_of(constrained, mesh):
  """The loss and gradients of a chain of all forms."""
  keep = lambda x: constrained(x, mesh)

  def loss_fn(params, x, rng):
    for form, w in zip(FORMS.values(), params, strict=True):
      x = form(keep, jnp.tanh(x @ w))
    place = NamedSharding(mesh, P("data"))
    x = jax.jit(lambda x: 2 * x, in_shardings=place, out_shardings=place)(x)
    return jnp.mean(jnp.where(jax.random.bernoulli(rng, 0.9, x.shape), x, 0) ** 2)

  key = jax.random.key(0)
  params = list(jax.random.normal(key, (len(FORMS), 8, 8)) / 3)
  x = jax.random.normal(key, (4 * N, 8))
  grad_fn = gradcomp.value_and_grad(loss_fn, param_specs=P(), **OVER)
  with jax.set_mesh(mesh):
    loss, grads = jax.jit(grad_fn)(params, x, key)
  return loss, [g.rows for g in grads]


@pytest.mark.parametrize("axes", MESHES)
def test_a_constraint_over_the_workers_changes_no_bit(axes):
  expected, *found = (grads_of(x, MESHES[axes]) for x in CONSTRAINTS.values())
  for grads in found:
    assert_same_bits(grads, expected)


def test_the_compiler_obeys_the_rest_of_a_spec():
  """Half the products a device, where ``model`` has two."""

  def flops(spec):
    def loss_fn(w, x):
      return jnp.mean(with_sharding_constraint(x @ w, spec) ** 2)

    grad_fn = gradcomp.value_and_grad(loss_fn, param_specs=P(), **OVER)
    shapes = [jax.ShapeDtypeStruct(n, jnp.float32) for n in ((64, 32), (16, 64))]
    with jax.set_mesh(MESHES["model"]):
      return jax.jit(grad_fn).lower(*shapes).compile().cost_analysis()["flops"]

  assert flops(P("data", "model")) < 0.6 * flops(P("data"))


def test_a_map_over_another_axis_may_use_numbers():
  """Literals have a type of the mesh in which the loss was traced."""
  inside = lambda x: jnp.where(x > 0.5, x / 2 + 1, 3 * x)
  half = dict(axis_names={"model"}, in_specs=P(None, "model"), check_vma=False)
  found = []
  mapped = jax.shard_map(inside, out_specs=P(None, "model"), **half)
  for layer_fn in (inside, mapped):
    loss_fn = lambda w, x, layer_fn=layer_fn: jnp.mean(layer_fn(w * x) ** 2)
    grad_fn = gradcomp.value_and_grad(loss_fn, param_specs=P(), **OVER)
    x = jax.random.normal(jax.random.key(0), (2 * N, 8))
    with jax.set_mesh(MESHES["model"]):
      found.append(jax.jit(grad_fn)(jnp.ones(8), x)[1].rows)
  assert_same_bits(*found)


def test_a_map_over_the_workers_is_refused():
  def loss_fn(w, x):
    return jnp.mean(jax.shard_map(jnp.tanh, in_specs=P("data"), out_specs=P("data"))(x))

  grad_fn = gradcomp.value_and_grad(loss_fn, param_specs=P(), **OVER)
  refused = pytest.raises(ValueError, match="`loss_fn` .*'data'")
  with jax.set_mesh(MESHES["model"]), refused:
    jax.eval_shape(grad_fn, jnp.ones(()), jnp.ones((64, 8)))
