"""Provides data of all kinds, TopK's rows of it, and the page's rule of selection."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.codecs.top_k import Selected
from gradcomp.codecs import Context, Memory
from tests.specs import top_k
from tests.support import laws


@functools.cache
def encoder(codec):
  """The encoding of a leaf, and of what else the choice depends on."""

  def encode(x, given):
    context = Context()
    if given is not None and codec.quantize == "asq":
      context = Context(step=jnp.where(given > 0, 0, 1))
    elif given is not None:
      context = Context(memory=Memory(own=Selected(given, None)), step=jnp.int32(1))
    return laws.encoded(codec, x, context)

  return jax.jit(encode)


def encode(codec, x, given=None):
  given = None if given is None else jnp.float32(given)
  return tuple(map(np.asarray, encoder(codec)(jnp.asarray(x), given)[:2]))


def layout(codec, size):
  """Returns what a decoder has to know of a codec."""
  n = codec.range_size or size
  slots = top_k.slots_of(codec.density, n, codec.selection, codec.slack)
  dtype = jnp.dtype(codec.dtype).name
  return dict(range_size=n, slots=slots, quantize=codec.quantize, value_dtype=dtype)


def entries_of(codec, rows, size):
  return top_k.entries(rows, **layout(codec, size))


def values_of(codec, rows, size):
  return top_k.decode(rows, size, **layout(codec, size))


@functools.cache
def data(size):
  """Every kind of data that a selection may meet, by name."""
  rng = np.random.default_rng(size)
  normal = rng.standard_normal(size).astype(np.float32)
  heavy = (rng.standard_cauchy(size) ** 3).astype(np.float32)
  return {
    "normal": normal,
    "uniform": rng.random(size).astype(np.float32),
    "heavy": heavy,
    "constant": np.full(size, -1.5, np.float32),
    "half zero": np.where(np.arange(size) % 2, normal, np.float32(0)),
    "half constant": np.where(np.arange(size) % 2, normal, np.float32(-2)),
    "spike": np.where(np.arange(size) == size // 3, np.float32(7), np.float32(0)),
    "zero": np.zeros(size, np.float32),
    "few": np.where(np.arange(size) < 3, normal, np.float32(-0.0)),
    "subnormal": normal * np.float32(2.0**-140),
    "powers": np.ldexp(np.float32(1), rng.integers(-149, 100, size)),
    "sorted": np.sort(normal),
  }


def check_selection(x, chosen, k, slots):
  """The page's rule: which magnitudes are sent, not where equal ones are."""
  order = top_k.order(x)
  sent = np.sort(order[chosen])[::-1]
  np.testing.assert_array_equal(sent[:k], top_k.largest(x, k))
  if len(chosen) == k:  # also where a threshold leaves these alone
    reach = (order >= sent[-1]).sum()
    assert slots == k or reach == k or reach > slots
  else:
    assert k < len(chosen) <= slots
    assert (order >= sent[-1]).sum() == len(chosen)
