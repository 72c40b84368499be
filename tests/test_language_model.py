"""The transformer of the examples is one."""

import jax
import jax.numpy as jnp
import numpy as np
from language_models import Transformer, attention, turned


def attended(query, key, value):
  """Attention in NumPy's doubles, one query after another."""
  query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
  batch, length, heads, size = query.shape
  out = np.zeros_like(value)
  for b, i, h in np.ndindex(batch, length, heads):
    scores = key[b, : i + 1, h] @ query[b, i, h] / np.sqrt(size)
    weights = np.exp(scores - scores.max())
    out[b, i, h] = weights @ value[b, : i + 1, h] / weights.sum()
  return out.reshape(batch, length, -1)


def test_attention_is_that_of_numpy():
  parts = jax.random.normal(jax.random.key(0), (3, 2, 5, 3, 4))
  # Sums of five terms in float32.
  np.testing.assert_allclose(attention(*parts), attended(*parts), atol=1e-5)


def test_turned_products_depend_on_the_distance():
  query, key = jax.random.normal(jax.random.key(0), (2, 6))
  at = lambda x: turned(jnp.broadcast_to(x, (1, 8, 1, 6)))[0, :, 0]
  products = np.asarray(at(query) @ at(key).T)
  for distance in range(-7, 8):
    # Angles of up to 7 radians are known to 1e-6 in float32.
    np.testing.assert_allclose(np.ptp(np.diagonal(products, distance)), 0, atol=1e-5)
  np.testing.assert_allclose(products[0, 0], query @ key, rtol=1e-5)
  assert np.ptp(products[0]) > 0.1


def test_transformer_sees_no_later_byte():
  model = Transformer(16, width=8, heads=2, layers=2)
  tokens = jax.random.randint(jax.random.key(0), (1, 6), 0, 16)

  @jax.jit
  def logits(tokens):
    params = model.init(jax.random.key(1), tokens)["params"]
    return model.apply({"params": params}, tokens)

  before, after = logits(tokens), logits(tokens.at[0, 3].add(1))
  assert before.shape == (1, 6, 16)
  assert np.array_equal(before[:, :3], after[:, :3])
  assert not np.allclose(before[:, 3:], after[:, 3:])
