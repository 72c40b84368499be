"""Leaves of one shape are encoded together or in turn, and have equal programs."""

import re

import jax
import jax.numpy as jnp
import pytest

import gradcomp
from gradcomp._src.codecs import encoding
from gradcomp.codecs import (
  QSGD,
  BlockFloat,
  Context,
  Dense,
  EightBit,
  FloatCast,
  Leaf,
  Natural,
  OneBit,
  Ternary,
)
from tests.plugins.slow_cases import one_in
from tests.support import laws, modes
from tests.support.assertions import assert_same_bits

CODECS = [QSGD(bits=4, bucket_size=64), Ternary(bucket_size=64)]
CODECS += [OneBit(per_column=True), FloatCast(rounding="stochastic")]
CODECS += [QSGD(bits=3, bucket_size=64, levels="nonuniform")]
CODECS += [EightBit(rounding="stochastic"), Natural()]
CODECS += [Dense(dtype=jnp.bfloat16, rounding="stochastic")]
SMALL = (64, 45)


def encoded(codecs, leaves, contexts, *, keep):
  groups = encoding.grouped(codecs, leaves, contexts)
  return list(encoding.encode_leaves(groups, leaves, contexts, keep=keep).values())


@pytest.mark.parametrize("codec", one_in(4, CODECS), ids=laws.name)
@pytest.mark.parametrize("keep", [False, True])
def test_leaves_have_the_bits_that_each_has_alone(codec, keep, monkeypatch):
  """Five of one shape in groups of two, among leaves of other shapes and dtypes."""
  monkeypatch.setattr(encoding, "JOINT_ENCODING_ELEMENTS", 2 * 64 * 45 + 7)
  shapes = [SMALL, (7,), SMALL, (0, 3), SMALL, SMALL, (0, 3), SMALL]
  leaves = [jnp.asarray(laws.gaussian(x, seed)) for seed, x in enumerate(shapes)]
  leaves[2] = leaves[2].at[1, 2].set(jnp.nan).at[5, 6].set(-0.0)
  leaves += [leaves[0].astype(jnp.bfloat16), leaves[4].astype(jnp.bfloat16)]
  codecs = [codec.bind(Leaf(leaf.shape)) for leaf in leaves]
  keys = [laws.KEY + i if codec.needs_key else None for i in range(len(leaves))]
  contexts = [
    Context(key, None, own.agree(leaf), own.init(Leaf(leaf.shape), laws.KEY))
    for own, leaf, key in zip(codecs, leaves, keys, strict=True)
  ]

  @jax.jit
  def both(leaves):
    together = encoded(codecs, leaves, contexts, keep=keep)
    alone = [
      encoded([c], [x], [context], keep=keep)[0]
      for c, x, context in zip(codecs, leaves, contexts, strict=True)
    ]
    return together, alone

  for ours, own in zip(*both(leaves), strict=True):
    assert_same_bits(ours.rows, own.rows)
    if ours.unsent is not None:
      assert_same_bits(ours.unsent, own.unsent)


def program(size, count, *, keep):
  """The compiled encoder of leaves of one size."""

  def rows(leaves, key):
    codecs, contexts = [QSGD(bits=4)] * count, [Context(key)] * count
    return [x.rows for x in encoded(codecs, leaves, contexts, keep=keep)]

  leaves = [jax.ShapeDtypeStruct((size,), jnp.float32)] * count
  return jax.jit(rows).lower(leaves, jax.ShapeDtypeStruct((2,), jnp.uint32)).compile()


def test_one_group_follows_another():
  """The copies of all leaves never exist at once, whatever order XLA chooses."""
  found = program(65536, 32, keep=False).memory_analysis()
  # Two groups of eight, and what else the encoder needs: less than half of all.
  assert found.temp_size_in_bytes < 4 * 65536 * 32 / 2


def test_small_leaves_of_a_shape_share_a_program():
  """In what is compiled, a cipher stands once for each group and not for each leaf."""
  parity = str(0x1BD11BDA)  # of a key's words, in each cipher
  many, few = (program(8192, n, keep=True).as_text().count(parity) for n in (40, 3))
  assert 0 < many <= few


def test_large_leaves_of_a_shape_take_turns(monkeypatch):
  """On a CPU, with the bits of each alone; in a map, too, and where one holds NaN."""
  monkeypatch.setattr(encoding, "_SMALL_LEAF_ELEMENTS", 1000)
  leaves = [jnp.asarray(laws.gaussian((40, 50), seed)) for seed in range(4)]
  leaves[2] = leaves[2].at[1, 2].set(jnp.nan)
  agreeing = [Ternary(), FloatCast(rounding="stochastic")]
  others = [QSGD(bits=4), OneBit(), EightBit(), BlockFloat(rounding="stochastic")]
  for codec in agreeing + others:
    contexts = [Context(laws.KEY + i) for i in range(4)]
    if codec in agreeing:
      groups = encoding.grouped([codec] * 4, leaves, contexts)
      found = zip(*encoding.statistics_of(groups, leaves), strict=True)
      for i, (agreed, measured) in enumerate(found):
        assert_same_bits(agreed, codec.agree(leaves[i]))
        contexts[i] = contexts[i]._replace(agreed=agreed, measured=measured)

    def rows(leaves, codec=codec, contexts=contexts):
      return [x.rows for x in encoded([codec] * 4, leaves, contexts, keep=True)]

    together = jax.jit(rows)
    assert "case" in together.lower(leaves).as_text()  # a switch
    for i, found in enumerate(together(leaves)):
      alone = encoded([codec], [leaves[i]], [contexts[i]], keep=False)
      assert_same_bits(found, alone[0].rows)
    two = jax.jit(jax.vmap(rows))([jnp.stack([x, -x]) for x in leaves])
    for ours, own in zip(two, together(leaves), strict=True):
      assert_same_bits(ours[0], own)


# Instructions: they have more, and the arithmetic of one slice's start has fewer.
ENCODERS, WITH_RESIDUALS, DECODERS, READERS = 40, 60, 30, 8


def long_fusions(optimizer, leaves, least):
  """The distinct texts of long fusions in the update of equal leaves, without names."""
  gradients = [jax.ShapeDtypeStruct((512, 1024), jnp.float32)] * leaves
  text = modes.traced(optimizer, gradients, 2).lower().compile().as_text()
  found = re.findall(r"^%fused_computation\S* \(.*?^\}", text, re.DOTALL | re.MULTILINE)
  return {anonymous(x) for x in found if x.count("\n") > least and "while" not in x}


def anonymous(computation):
  """A computation's instructions with numbered names, without their origins."""
  names = {}
  number = lambda name: f"%{names.setdefault(name.group(), len(names))}"
  body = computation.split("\n", 1)[1]
  return re.sub(r"%[\w.-]+", number, re.sub(r", metadata=.*", "", body))


@pytest.mark.parametrize(
  ("method", "least"),
  [
    (lambda: gradcomp.qsgd(bits=4, axis_name="data", exchange="two_shot"), DECODERS),
    (lambda: gradcomp.terngrad(axis_name="data"), ENCODERS),
    (lambda: gradcomp.onebit_sgd(axis_name="data"), WITH_RESIDUALS),
    (lambda: gradcomp.redsync(axis_name="data"), READERS),
  ],
  ids=["qsgd", "terngrad", "onebit", "redsync"],
)
def test_more_leaves_have_no_more_programs(method, least):
  """XLA:CPU compiles equal programs once; a loop may encode three leaves or more."""
  few, many, more = (long_fusions(method(), leaves, least) for leaves in (2, 4, 8))
  assert few
  # What all leaves share, like the sum of an owner's rows, depends on their number.
  assert len(more) == len(many) <= len(few)
