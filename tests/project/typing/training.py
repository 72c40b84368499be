"""Steps of the front page and of one call: types of parameters, and options."""

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import optax

import gradcomp

Params = dict[str, jax.Array]
OPTIMIZER = optax.chain(gradcomp.qsgd(bits=4, axis_name="data"), optax.sgd(0.1))


def loss_fn(params: Params, x: jax.Array, scale: float = 1.0) -> jax.Array:
  return scale * jnp.mean((x @ params["w"] - x[:, ::-1]) ** 2)


def loss_and_accuracy(params: Params, x: jax.Array) -> tuple[jax.Array, float]:
  return loss_fn(params, x), 1.0


def weighed(params: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
  return loss_fn(params, x), jnp.ones(())


def loss_of_array(params: jax.Array, batch: jax.Array) -> jax.Array:
  return loss_fn({"w": params}, batch)


def batch_norm_loss(
  params: Params, averages: jax.Array, batch: jax.Array
) -> tuple[jax.Array, jax.Array]:
  return loss_fn(params, batch - averages), averages


def front_page(params: Params, batch: jax.Array) -> None:
  opt_state = OPTIMIZER.init(params)

  @jax.jit
  def train_step(
    params: Params, opt_state: optax.OptState, batch: jax.Array
  ) -> tuple[optax.Params, optax.OptState, jax.Array]:
    loss, grads = gradcomp.value_and_grad(loss_fn, axis_name="data")(params, batch)
    assert_type(loss, jax.Array)
    assert_type(grads, Params)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  report = gradcomp.wire_report(train_step.lower(params, opt_state, batch))
  assert_type(report, gradcomp.wire.WireReport)
  assert_type(report.bytes_sent, int)
  grad_fn = gradcomp.value_and_grad(loss_and_accuracy, axis_name="data", has_aux=True)
  (_, accuracy), grads = grad_fn(params, batch)
  assert_type(accuracy, float)
  assert_type(grads, Params)
  of_batch = gradcomp.value_and_grad(loss_fn, axis_name=None, argnums=1)
  of_weighed = gradcomp.value_and_grad(weighed, axis_name="data", has_weight=True)
  of_batch(params, x=batch)
  of_weighed(params, batch)
  gradcomp.value_and_grad(lambda w, x: x @ w, axis_name=None)(params, batch)


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


def one_call(params: Params, batch: jax.Array, opt_state: optax.OptState) -> None:
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
  options = gradcomp.TrainOptions(model_state="mean")
  with_state = gradcomp.make_train_step(
    batch_norm_loss, OPTIMIZER, axis_name="data", options=options
  )
  params, opt_state, _, _ = with_state(params, opt_state, jnp.zeros(3), batch)
  assert_type(params, Params)


def mistakes(params: Params, batch: jax.Array, opt_state: Any) -> None:
  gradcomp.value_and_grad(loss_fn, axis_name="data")(params)  # type: ignore[call-arg]
  of_batch = gradcomp.value_and_grad(loss_fn, axis_name=None, argnums=1)
  of_batch(params)  # type: ignore[call-arg]
  gradcomp.value_and_grad(loss_fn)(params, batch)  # type: ignore[call-overload]
  gradcomp.qsgd(bit=4)  # type: ignore[call-arg]
  gradcomp.qsgd(bits="4")  # type: ignore[arg-type]
  gradcomp.qsgd(exchange="two_shots")  # type: ignore[arg-type]
  gradcomp.quantized(bits=4)  # type: ignore[attr-defined]
  print(gradcomp.cost.plans)  # type: ignore[attr-defined]
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
