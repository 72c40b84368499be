"""Provides every exchange that a codec can take, and what the tests give to them."""

import dataclasses
import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp
from gradcomp.codecs import (
  QSGD,
  BlockFloat,
  BlockTop,
  Dense,
  EightBit,
  FloatCast,
  Natural,
  OneBit,
  Sign,
  Ternary,
)
from tests.support import laws, modes

CODECS = [
  QSGD(bits=4, bucket_size=32),
  QSGD(bits=8, bucket_size=32, levels="uniform", rounding="nearest"),
  QSGD(bits=3, bucket_size=None, levels="uniform", norm="l2"),
  Dense(dtype=jnp.bfloat16),
]
SHARED = [
  QSGD(bits=4, bucket_size=32, share_scale=True),
  QSGD(bits=3, bucket_size=None, levels="uniform", share_scale=True),
]
CLIPPED = QSGD(bits=2, bucket_size=32, norm="rms", levels="uniform", rounding="nearest")
ROTATED = QSGD(bits=4, bucket_size=32, rotate=32)
VOTES = Sign(bucket_size=32, scale="one", vote="majority")
NVFP4 = BlockFloat(element="e2m1", scale="e4m3", block_size=16, rounding="stochastic")
# Every exchange that a codec can take.
CASES = [
  *itertools.product(CODECS, ["all_gather", "two_shot", "ring", "hierarchical"]),
  *itertools.product(SHARED, ["all_gather", "two_shot", "psum"]),
  # What is new in other codecs, each where it matters: tiles by column, residuals
  # without decoding, statistics of a whole leaf, levels that are fitted to all workers.
  (OneBit(bucket_size=32), "two_shot"),
  (OneBit(bucket_size=32), "ring"),
  (OneBit(per_column=True), "all_gather"),
  (OneBit(per_column=True), "hierarchical"),
  (Ternary(), "two_shot"),
  (Ternary(packing="base3"), "psum"),
  (Ternary(packing="base3", bucket_size=32, share_scale=False), "two_shot"),
  (EightBit(), "two_shot"),
  (EightBit(dtype="dynamic_map", bucket_size=32, rounding="stochastic"), "ring"),
  (QSGD(bits=2, bucket_size=32, levels="nonuniform"), "all_gather"),
  (QSGD(bits=3, bucket_size=32, levels="nonuniform"), "two_shot"),
  (QSGD(bits=4, bucket_size=None, levels="nonuniform"), "hierarchical"),
  # Sums of codes in their own format.
  (FloatCast(), "all_gather"),
  (FloatCast(accumulate="float32"), "two_shot"),
  (FloatCast(accumulate="kahan", rounding="stochastic"), "ring"),
  (FloatCast(exponent_bits=3, mantissa_bits=0), "hierarchical"),
  # Sums in float32 of what is rounded at random, in both stages.
  (Dense(dtype=jnp.bfloat16, rounding="stochastic"), "two_shot"),
  (Natural(), "two_shot"),
  # Last buckets that are filled with copies, also where sums start from leaves.
  (CLIPPED, "two_shot"),
  (CLIPPED, "ring"),
  # Sums of rotated tiles, also those of integers, and where sums start from leaves.
  (ROTATED, "two_shot"),
  (dataclasses.replace(ROTATED, share_scale=True), "psum"),
  (dataclasses.replace(CLIPPED, rotate=8), "ring"),
  # Sums of tiles, of which an owner sends some elements.
  (BlockTop(block_size=8), "two_shot"),
  (BlockTop(block_size=8), "hierarchical"),
  # Counts of signs, and votes, of which workers keep what they are outvoted by.
  (Sign(bucket_size=32), "two_shot"),
  (Sign(bucket_size=32, scale="one"), "two_shot"),
  (VOTES, "two_shot"),
  (VOTES, "all_gather"),
  # A scale of a leaf, and then one of each row.
  (NVFP4, "two_shot"),
]


# Of these, each exchange and each kind of sum: what is sent follows from them, and from
# the length of a row.
SENT = [*CASES[:4], *CASES[17:19], CASES[26], *CASES[32:39:2]]


def case_name(part):
  known = isinstance(part, str | int | None)
  return str(part) if known else laws.name(part)


def plain_and_slow(cases, *plain):
  """Parameters of a test: those of a plain run, and all others as slow ones."""
  named = lambda case, **options: pytest.param(
    *case, id="-".join(map(case_name, case)), **options
  )
  others = [case for case in cases if case not in plain]
  return [
    *(named(case) for case in plain),
    *(named(case, marks=pytest.mark.slow) for case in others),
  ]


@functools.cache  # for modes, which compiles once a transformation
def transformation(codec, exchange, workers, **options):
  exchange = modes.grouped(exchange, 2 if workers % 2 == 0 else 1)
  if options.get("feedback", not codec.unbiased):
    codec = laws.kept(codec)
  return gradcomp.compress(codec, axis_name="data", exchange=exchange, **options)


def small_gradients(workers, seed=0):
  """Makes a leaf of no whole tiles, and one that stays dense: enough for all cases."""
  rng = np.random.default_rng(seed)
  shapes = {"a": (9, 70), "b": (3,)}
  return {
    name: jnp.asarray(rng.standard_normal((workers, *shape)), jnp.float32)
    for name, shape in shapes.items()
  }


# Leaves of a small network, of which the tests count the bytes that are sent.
SHAPES = {"w": (512, 512), "b": (512,), "v": (3, 3, 64, 128), "c": (100, 37)}
ELEMENTS = sum(int(np.prod(shape)) for shape in SHAPES.values())
