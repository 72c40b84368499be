"""Every optimizer of optax trains behind an exchange, real and complex parameters.

The hyperparameters are those of optax's own tests of these optimizers. The parabola is
theirs, too, with more elements, so that codecs have something to encode.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp
from tests.plugins.slow_cases import slow

STEPS = 200

OPTIMIZERS = {
  "adabelief": {"learning_rate": 1e-2},
  "adadelta": {"learning_rate": 0.1},
  "adafactor": {"learning_rate": 5e-3},
  "adagrad": {"learning_rate": 1.0},
  "adam": {"learning_rate": 1e-1},
  "adamax": {"learning_rate": 1e-1},
  "adamaxw": {"learning_rate": 1e-1},
  "adamw": {"learning_rate": 1e-1},
  "adan": {"learning_rate": 1e-1},
  "amsgrad": {"learning_rate": 1e-1},
  "fromage": {"learning_rate": 5e-3},
  "lamb": {"learning_rate": 1e-3},
  "lars": {"learning_rate": 1.0},
  "lion": {"learning_rate": 1e-2, "weight_decay": 1e-4},
  "nadam": {"learning_rate": 1e-2},
  "nadamw": {"learning_rate": 1e-2},
  "noisy_sgd": {"learning_rate": 1e-3, "eta": 1e-4, "key": 0},
  "novograd": {"learning_rate": 1e-3},
  "optimistic_adam_v2": {"learning_rate": 2e-3},
  "optimistic_gradient_descent": {"learning_rate": 2e-3, "alpha": 0.7, "beta": 0.1},
  "polyak_sgd": {"max_learning_rate": 1.0},
  "radam": {"learning_rate": 5e-3},
  "rmsprop": {"learning_rate": 5e-3, "momentum": 0.9},
  "rprop": {"learning_rate": 1e-1},
  "sgd": {"learning_rate": 1e-3, "momentum": 0.9},
  "sign_sgd": {"learning_rate": 1e-1},
  "signum": {"learning_rate": 1e-2},
  "sm3": {"learning_rate": 1.0},
  "yogi": {"learning_rate": 1e-1},
}

# As optax's own tests say.
REAL_ONLY = {
  *("fromage", "noisy_sgd", "sm3", "optimistic_gradient_descent", "lion", "rprop"),
  *("adadelta", "adan", "polyak_sgd", "sign_sgd", "signum"),
}

EXCHANGES = {
  "qsgd": functools.partial(gradcomp.qsgd, 8, bucket_size=32, min_leaf_size=0),
  "eight_bit": functools.partial(gradcomp.eight_bit, min_leaf_size=0),
  "dense": gradcomp.dense,
}

PLAIN = [("adam", "complex64")]
OTHERS = [
  (name, dtype)
  for name in OPTIMIZERS
  for dtype in ("float32", "complex64")
  if (dtype == "float32" or name not in REAL_ONLY) and (name, dtype) not in PLAIN
]


def target(dtype):
  """128 numbers of different magnitudes."""
  x = np.linspace(-1, 1, 128) ** 3
  return jnp.asarray(x * (1 + 1j) if dtype == "complex64" else x, dtype)


@functools.cache
def losses(name, dtype, exchange):
  """The first and the last loss of a parabola."""
  optimizer = getattr(optax, name)(**OPTIMIZERS[name])
  if exchange is not None:
    optimizer = optax.chain(EXCHANGES[exchange](), optimizer)
  optimizer = optax.with_extra_args_support(optimizer)

  def objective(params):
    distance = params - target(dtype)
    return jnp.sum(jnp.real(distance * jnp.conj(distance)))

  def step(carry, _):
    params, state = carry
    value, grads = jax.value_and_grad(objective)(params)
    updates, state = optimizer.update(jnp.conj(grads), state, params, value=value)
    return (optax.apply_updates(params, updates), state), value

  params = target(dtype)[::-1] + 1
  scan = jax.jit(lambda carry: jax.lax.scan(step, carry, None, STEPS))
  values = scan((params, optimizer.init(params)))[1]
  return float(values[0]), float(values[-1])


@pytest.mark.parametrize("name, dtype", [*PLAIN, *slow(*OTHERS)])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_an_optimizer_trains_behind_an_exchange(name, dtype, exchange):
  """As well as without, to a hundredth of the way."""
  if (name, exchange) == ("rprop", "qsgd"):
    pytest.skip("its steps grow by the signs of gradients, and here they are noise")
  first, last = losses(name, dtype, exchange)
  _, expected = losses(name, dtype, None)
  assert last < first
  assert last < expected + 0.01 * first
