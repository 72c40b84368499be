"""Trains on eight devices with gradients of 4 bits: python -m examples.quickstart."""

import jax
import jax.numpy as jnp
import optax

import gradcomp

jax.config.update("jax_num_cpu_devices", 8)  # emulates them; delete it for real devices


def loss_fn(params, x):
  """The mean squared error of a linear model that learns to reverse its inputs."""
  return jnp.mean((x @ params["w"] - x[:, ::-1]) ** 2)


def main(steps: int = 20) -> None:
  batch = jax.random.normal(jax.random.key(0), (64, 512))
  batch = jax.device_put(batch, jax.P("data"))  # a device has some of the rows
  params = {"w": jnp.zeros((512, 512))}  # each device has all parameters
  compressed = gradcomp.qsgd(bits=4, axis_name="data")  # encodes, exchanges, averages
  optimizer = optax.chain(compressed, optax.adam(1e-2))
  opt_state = optimizer.init(params)

  @jax.jit
  def train_step(params, opt_state, batch):
    loss, grads = gradcomp.value_and_grad(loss_fn, axis_name="data")(params, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  print(gradcomp.wire_report(train_step.lower(params, opt_state, batch)))
  for step in range(steps):
    params, opt_state, loss = train_step(params, opt_state, batch)
    print(f"step {step}: loss {float(loss):.4f}")  # float waits, as emulation needs


if __name__ == "__main__":
  with jax.set_mesh(jax.make_mesh((jax.device_count(),), ("data",))):
    main()
