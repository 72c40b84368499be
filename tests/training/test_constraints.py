"""A loss may constrain its activations over the axis of the workers, in any form."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.lax import with_sharding_constraint  # bound before any trace
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from tests.support.assertions import assert_same_bits
from tests.support.cases.steps import OVER, N

FREE = P.UNCONSTRAINED


def two_axes():
  return jax.make_mesh((N, 2), ("data", "model"), (AxisType.Auto,) * 2)


def layer(x, w):
  return jnp.tanh(x @ w)


def logical(x):
  with nn.logical_axis_rules([("batch", "data"), ("wide", None)]):
    return nn.with_logical_constraint(x, ("batch", "wide"), mesh=None)


def in_jit(keep, x):
  place = NamedSharding(two_axes(), P("data"))
  return jax.jit(lambda x: 2 * x, in_shardings=place, out_shardings=place)(x)


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
CONSTRAINTS = {
  "bare": lambda x: with_sharding_constraint(x, P("data")),
  "named": lambda x: lax.with_sharding_constraint(
    x, NamedSharding(two_axes(), P(("data",)))
  ),
  "free": lambda x: with_sharding_constraint(x, P("data", *[FREE] * (x.ndim - 1))),
  "flax": lambda x: logical(x) if x.ndim == 2 else x,
}


def loss_of(keep):
  def loss_fn(params, x, rng):
    for form, w in zip(FORMS.values(), params, strict=True):
      x = form(keep, layer(x, w))
    x = jnp.where(jax.random.bernoulli(rng, 0.9, x.shape), x, 0)
    return jnp.mean(in_jit(keep, x) ** 2)

  return loss_fn


def grads_of(keep, **options):
  """The loss and gradients of a chain of all forms, on a mesh with another axis."""
  key = jax.random.key(0)
  params = list(jax.random.normal(key, (len(FORMS), 8, 8)) / 3)
  x = jax.random.normal(key, (4 * N, 8))
  grad_fn = gradcomp.value_and_grad(loss_of(keep), param_specs=P(), **OVER, **options)
  with jax.set_mesh(two_axes()):
    loss, grads = jax.jit(grad_fn)(params, x, key)
  return loss, [g.rows for g in grads]


def test_a_constraint_over_the_workers_changes_no_bit():
  expected = grads_of(lambda x: x)
  for keep in CONSTRAINTS.values():
    assert_same_bits(grads_of(keep), expected)


def test_the_compiler_obeys_the_rest_of_a_spec():
  """Half the products a device, where ``model`` has two."""

  def flops(spec):
    def loss_fn(w, x):
      return jnp.mean(with_sharding_constraint(x @ w, spec) ** 2)

    grad_fn = gradcomp.value_and_grad(loss_fn, param_specs=P(), **OVER)
    shapes = [jax.ShapeDtypeStruct(n, jnp.float32) for n in ((64, 32), (16, 64))]
    with jax.set_mesh(two_axes()):
      return jax.jit(grad_fn).lower(*shapes).compile().cost_analysis()["flops"]

  assert flops(P("data", "model")) < 0.6 * flops(P("data"))


def test_a_map_over_the_workers_is_refused():
  def loss_fn(w, x):
    return jnp.mean(jax.shard_map(jnp.tanh, in_specs=P("data"), out_specs=P("data"))(x))

  grad_fn = gradcomp.value_and_grad(loss_fn, param_specs=P(), **OVER)
  with jax.set_mesh(two_axes()), pytest.raises(ValueError, match="`loss_fn` .*'data'"):
    jax.eval_shape(grad_fn, jnp.ones(()), jnp.ones((64, 8)))
