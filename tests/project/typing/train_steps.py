"""Train steps take the parameters of their loss, and know their options."""

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import optax

import gradcomp

Params = dict[str, jax.Array]
OPTIMIZER = optax.chain(gradcomp.qsgd(bits=4, axis_name="data"), optax.sgd(0.1))


def loss_fn(params: Params, batch: jax.Array, scale: float = 1.0) -> jax.Array:
  return scale * jnp.mean((batch @ params["w"]) ** 2)


def loss_of_array(params: jax.Array, batch: jax.Array) -> jax.Array:
  return loss_fn({"w": params}, batch)


def batch_norm_loss(
  params: Params, averages: jax.Array, batch: jax.Array
) -> tuple[jax.Array, jax.Array]:
  return loss_fn(params, batch - averages), averages


def run(
  step: gradcomp.TrainStep[Params], params: Params, batches: list[jax.Array]
) -> Params:
  """Takes any step that trains such parameters."""
  opt_state = OPTIMIZER.init(params)
  for batch in batches:
    params, opt_state, metrics = step(params, opt_state, batch)
    assert_type(metrics, dict[str, Any])
    assert_type(gradcomp.telemetry.scalars(metrics), dict[str, float])
  return params


def train(params: Params, batch: jax.Array, opt_state: optax.OptState) -> None:
  options = gradcomp.TrainOptions(accumulate=2, report=True)
  step = gradcomp.make_train_step(
    loss_fn, OPTIMIZER, axis_name="data", donate=False, options=options
  )
  assert_type(step, gradcomp.TrainStep[Params])
  assert_type(run(step, params, [batch]), Params)
  key, more = jax.random.key(0), {"scale": 2.0}
  params, opt_state, _ = step(params, opt_state, batch, rng=key, extra_args=more)
  params, opt_state, _ = step(params, opt_state, batch, 0.5, inspect=True)
  assert_type(step.lower(params, opt_state, batch), jax.stages.Lowered)
  of_any = gradcomp.make_train_step(
    lambda params, batch: jnp.mean(batch @ params), OPTIMIZER, axis_name=None
  )
  of_any(jnp.ones(3), opt_state, batch)


def with_model_state(params: Params, batch: jax.Array, opt_state: Any) -> None:
  step = gradcomp.make_train_step(
    batch_norm_loss,
    OPTIMIZER,
    axis_name="data",
    options=gradcomp.TrainOptions(model_state="mean"),
  )
  params, opt_state, _, _ = step(params, opt_state, jnp.zeros(3), batch)
  assert_type(params, Params)


def mistakes(params: Params, batch: jax.Array, opt_state: Any) -> None:
  step = gradcomp.make_train_step(loss_fn, OPTIMIZER, axis_name="data")
  step(batch, opt_state, batch)  # type: ignore[call-overload]
  step(params, opt_state, batch, inspct=True)  # type: ignore[call-overload]
  step(params, opt_state, batch, rng=0)  # type: ignore[call-overload]
  params, opt_state = step(params, opt_state, batch)  # type: ignore[misc]
  other = gradcomp.make_train_step(loss_of_array, OPTIMIZER, axis_name="data")
  run(other, params, [batch])  # type: ignore[arg-type]
  gradcomp.make_train_step(loss_fn, OPTIMIZER, axis="data")  # type: ignore[call-arg]
  gradcomp.TrainOptions(accumulation=2)  # type: ignore[call-arg]
  gradcomp.TrainOptions(model_state="sum")  # type: ignore[arg-type]
