"""Makes matrices of low rank, and averages factors of N workers by hand."""

import functools

import jax
import numpy as np

from gradcomp.codecs import Leaf
from tests.support.assertions import assert_same_bits

KEY = np.array([1, 2], np.uint32)


def bound(codec, shape):
  """The codec of a leaf, and its first memory."""
  codec = codec.bind(Leaf(shape))
  return codec, np.asarray(first(codec, Leaf(shape), KEY))


@functools.partial(jax.jit, static_argnums=(0, 1))
def first(codec, leaf, key):
  return codec.init(leaf, key).shared


def gaussian(*shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def of_rank(rank, *shape, seed=0):
  """A matrix whose singular values fall by a half."""
  draw = np.random.default_rng(seed).standard_normal
  left, right = (np.linalg.qr(draw((size, rank)))[0] for size in shape)
  return np.float32((left * 0.5 ** np.arange(rank)) @ right.T)


def error(got, expected):
  return np.linalg.norm(got - expected) / np.linalg.norm(expected)


@functools.cache
def _together(codec):
  """All workers' averages as one program, which takes the means in between."""

  @jax.jit
  def run(leaves, memory):
    own = [list(parts) for parts in zip(*leaves, strict=True)]
    workers = [codec.talk(parts, memory) for parts in own]
    asked = [next(worker) for worker in workers]
    for side in codec.sides:
      assert all(x.shape == side for parts in asked for x in parts)
      means = [sum(parts) / len(workers) for parts in zip(*asked, strict=True)]
      asked = [worker.send(means) for worker in workers]
    return asked

  return run


def together(codec, leaves, memory):
  """The means of all workers' leaves, `[N, ...]` each, and what all share anew."""
  answers = jax.device_get(_together(codec)(leaves, memory))
  for other in answers[1:]:
    assert_same_bits(other, answers[0])
  return answers[0]
