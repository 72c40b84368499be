"""A policy sends each leaf as its codec alone would, all of them in one message."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp
from gradcomp.codecs import QSGD, Dense, EightBit, OneBit, Policy, RandomK, TopK
from gradcomp.exchange import TwoShot
from tests.plugins.slow_cases import slow
from tests.support import laws, modes

WORKERS = 4
SHAPES = {"a": {"bias": (300,), "kernel": (70, 71)}, "b": [(64, 40)], "c": ()}


def gradients(steps):
  rng = np.random.default_rng(3)
  normal = lambda shape: rng.standard_normal((WORKERS, *shape)).astype(np.float32)
  is_shape = lambda x: isinstance(x, tuple)
  return [jax.tree.map(normal, SHAPES, is_leaf=is_shape) for _ in range(steps)]


def run(codec, steps, exchange="all_gather"):
  tx = transformation(codec, exchange)
  return modes.run_with_state("vmap", tx, steps)


def transformation(codec, exchange="all_gather"):
  return laws.compressed(codec, exchange, "error", min_leaf_size=64)


def part(tree, path):
  """One leaf of a tree, in its place."""
  told = lambda at: jax.tree_util.keystr(at, simple=True, separator="/")
  keep = lambda at, leaf: leaf if told(at) == path else None
  return jax.tree_util.tree_map_with_path(keep, tree)


RULES = [
  ("bias|^c$", Dense()),
  ("kernel", QSGD(bits=4, bucket_size=64, implementation="xla")),
  ("^b/0", TopK(density=0.05, selection="sampled", implementation="xla")),
]


@pytest.mark.parametrize("exchange", ["all_gather", *slow(TwoShot(), "ring")], ids=str)
def test_each_leaf_is_sent_as_its_codec_alone_would(exchange):
  """Outputs and residuals have the same bits: keys derive from names of leaves."""
  rules = list(RULES)
  if exchange == "ring":
    rules[2] = ("^b/0", OneBit(bucket_size=64, implementation="xla"))
  steps = gradients(3)
  outputs, state = run(Policy(rules), steps, exchange)
  for path, (_, codec) in zip(("a/bias", "a/kernel", "b/0"), rules, strict=True):
    alone, kept = run(codec, [part(grads, path) for grads in steps], exchange)
    whole = [part(output, path) for output in outputs], part(state.residual, path)
    chex.assert_trees_all_equal(whole, (alone, kept.residual))
  for output in outputs:
    for leaf in jax.tree.leaves(output):
      np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))


def test_one_message_and_the_rule_of_each_leaf():
  params = jax.tree.map(lambda leaf: leaf[0], gradients(1)[0])
  tx = transformation(Policy([("kernel", QSGD()), ("a|b", EightBit())]))
  explained = gradcomp.explain(tx, params, workers=WORKERS)
  assert explained.messages == 1
  found = [(x.path, type(x.codec).__name__, x.rule) for x in explained.leaves]
  assert found == [
    ("['a']['bias']", "Dense", "a|b"),  # a row of EightBit would be longer
    ("['a']['kernel']", "QSGD", "kernel"),
    ("['b'][0]", "EightBit", "a|b"),
    ("['c']", "Dense", ""),
  ]
  assert str(explained).splitlines()[0].endswith("rule")
  plain = gradcomp.explain(transformation(QSGD()), params, workers=WORKERS)
  assert "rule" not in str(plain)


def test_auto_takes_an_exchange_that_every_codec_allows():
  """RandomK lets no owner encode again, and no backend adds the codes of QSGD."""
  params = {"a": jnp.zeros((512, 512)), "b": jnp.zeros((512, 512))}
  tx = transformation(Policy([("a", RandomK(density=0.1)), ("b", QSGD())]), "auto")
  leaves = gradcomp.explain(tx, params, workers=64).leaves
  assert [leaf.exchange for leaf in leaves] == ["all_gather"] * 2
  assert "no second encoding" in leaves[0].reason


def test_only_codecs_that_must_draw_alike_do():
  """All workers choose the same elements of one leaf, and round another apart."""
  rules = [("a", RandomK(density=0.25)), ("b", QSGD(bits=4, implementation="xla"))]
  grads = {name: np.stack([laws.gaussian(4096)] * WORKERS) for name in "ab"}
  (output,), _ = run(Policy(rules), [grads], "local")
  chosen, rounded = np.asarray(output["a"]), np.asarray(output["b"])
  assert 1000 < np.count_nonzero(chosen[0]) <= 1024
  np.testing.assert_array_equal(chosen, np.broadcast_to(chosen[:1], chosen.shape))
  assert (rounded[0] != rounded[1]).mean() > 0.1


def test_feedback_is_on_where_one_codec_is_biased():
  tx = gradcomp.policy([("kernel", OneBit()), (".", QSGD())])
  params = {"kernel": jnp.ones((64, 64)), "bias": jnp.ones(64)}
  assert jax.eval_shape(tx.init, params).residual is not None
  assert gradcomp.policy([(".", QSGD())]).init(params).residual is None


def test_codecs_with_memories_remember_side_by_side():
  rules = [("kernel", QSGD(bits=3, bucket_size=64, levels="nonuniform")), *RULES[2:]]
  _, state = run(Policy(rules), gradients(2))
  assert list(state.memory.shared[()]) == [1]
  assert list(state.memory.own[("data",)]) == [2]
  used = state.memory.own[("data",)][2].used
  assert used.shape == (WORKERS, 1) and (np.asarray(used) > 0).all()
