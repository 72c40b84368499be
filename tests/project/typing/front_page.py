"""The step of the front page: gradients have the type of the parameters."""

from typing import assert_type

import jax
import jax.numpy as jnp
import optax

import gradcomp

Params = dict[str, jax.Array]


def loss_fn(params: Params, x: jax.Array) -> jax.Array:
  return jnp.mean((x @ params["w"] - x[:, ::-1]) ** 2)


def loss_and_accuracy(params: Params, x: jax.Array) -> tuple[jax.Array, float]:
  return loss_fn(params, x), 1.0


def weighed(params: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
  return loss_fn(params, x), jnp.ones(())


def train(params: Params, batch: jax.Array) -> None:
  optimizer = optax.chain(gradcomp.qsgd(bits=4, axis_name="data"), optax.adam(1e-2))
  opt_state = optimizer.init(params)

  @jax.jit
  def train_step(
    params: Params, opt_state: optax.OptState, batch: jax.Array
  ) -> tuple[optax.Params, optax.OptState, jax.Array]:
    loss, grads = gradcomp.value_and_grad(loss_fn, axis_name="data")(params, batch)
    assert_type(loss, jax.Array)
    assert_type(grads, Params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  report = gradcomp.wire_report(train_step.lower(params, opt_state, batch))
  assert_type(report, gradcomp.wire.WireReport)
  assert_type(report.bytes_sent, int)


def other_losses(params: Params, batch: jax.Array) -> None:
  grad_fn = gradcomp.value_and_grad(loss_and_accuracy, axis_name="data", has_aux=True)
  (_, accuracy), grads = grad_fn(params, batch)
  assert_type(accuracy, float)
  assert_type(grads, Params)
  of_batch = gradcomp.value_and_grad(loss_fn, axis_name=None, argnums=1)
  of_weighed = gradcomp.value_and_grad(weighed, axis_name="data", has_weight=True)
  of_batch(params, x=batch)
  of_weighed(params, batch)
  gradcomp.value_and_grad(lambda w, x: x @ w, axis_name=None)(params, batch)


def mistakes(params: Params, batch: jax.Array) -> None:
  gradcomp.value_and_grad(loss_fn, axis_name="data")(params)  # type: ignore[call-arg]
  of_batch = gradcomp.value_and_grad(loss_fn, axis_name=None, argnums=1)
  of_batch(params)  # type: ignore[call-arg]
  gradcomp.value_and_grad(loss_fn)(params, batch)  # type: ignore[call-overload]
  gradcomp.qsgd(bit=4)  # type: ignore[call-arg]
  gradcomp.qsgd(bits="4")  # type: ignore[arg-type]
  gradcomp.qsgd(exchange="two_shots")  # type: ignore[arg-type]
  gradcomp.quantized(bits=4)  # type: ignore[attr-defined]
  print(gradcomp.cost.plans)  # type: ignore[attr-defined]
