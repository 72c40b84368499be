"""allocate sends the least bytes at the error of a uniform codec, leaf by leaf."""

import collections
import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.codecs.sums.records import Leaf
from gradcomp._src.cost.allocate_search import PARTS, Option, least_bytes
from gradcomp.codecs import QSGD, Dense, OneBit, PowerSGD
from gradcomp.cost import allocate
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import assert_same_bits

WIDTHS = [QSGD(bits=bits, rounding="nearest") for bits in (2, 4, 5, 8)]
FOUR = WIDTHS[1]
SHAPE = (64, 128)  # whole tiles at 2 and 4 bits


def gradients(names, *, seed=0, shape=SHAPE):
  """Makes leaves whose sizes of numbers differ by powers of 16."""
  keys = jax.random.split(jax.random.key(seed), len(names))
  scales = [16.0**-number for number in range(len(names))]
  return {
    name: np.asarray(scale * jax.random.normal(key, shape))
    for name, key, scale in zip(names, keys, scales, strict=True)
  }


def allocated(*trees, **options):
  given = {"uniform": FOUR, "candidates": WIDTHS} | options
  return allocate(trees, **given)


def fewest(leaves, bound):
  """Returns the fewest bytes of all choices within a bound, by trying each."""
  exact = lambda choice: sum(Fraction(option.error) for option in choice)
  found = (choice for choice in itertools.product(*leaves) if exact(choice) <= bound)
  return min(sum(option.nbytes for option in choice) for choice in found)


def problem(rng):
  """Makes four leaves with five options each; bytes fall as errors rise."""
  leaves = []
  for _ in range(4):
    errors = np.sort(rng.lognormal(0, 2, 5))
    sizes = np.sort(rng.integers(0, 1000, 5))[::-1]
    leaves.append(
      [Option(int(n), float(e)) for n, e in zip(sizes, errors, strict=True)]
    )
  return leaves, math.fsum(options[2].error for options in leaves)


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_sends_fewer_bytes(seed):
  leaves, bound = problem(np.random.default_rng(seed))
  numbers = least_bytes(leaves, bound)
  chosen = [options[n] for options, n in zip(leaves, numbers, strict=True)]
  assert sum(Fraction(x.error) for x in chosen) <= Fraction(bound)
  sent = sum(x.nbytes for x in chosen)
  gap = Fraction(len(leaves), PARTS)
  assert fewest(leaves, Fraction(bound)) <= sent
  assert sent <= fewest(leaves, Fraction(bound) * (1 - gap))


def test_a_bound_that_nothing_keeps():
  assert least_bytes([[Option(1, 2.0)]], 1.0) is None
  assert least_bytes([[Option(1, 2.0), Option(5, 0.0)]], 0.0) == [1]
  assert least_bytes([[Option(3, 0.0), Option(3, 0.5)]], 1.0) == [0]


def test_errors_and_bytes_are_those_of_the_payloads():
  """Nearest rounding, so that a codec alone shows each error, added over steps."""
  steps = [gradients("abc", seed=seed) for seed in (0, 1)]
  found = allocated(*steps)
  lost = lambda codec, x: np.sum(
    (np.asarray(codec.roundtrip(x), np.float64) - x.astype(np.float64)) ** 2
  )
  for leaf in found.leaves:
    own = [step[leaf.path] for step in steps]
    assert leaf.error == math.fsum(lost(leaf.codec, x) for x in own)
    assert leaf.uniform_error == math.fsum(lost(FOUR, x) for x in own)
    assert leaf.nbytes == leaf.codec.encode(own[0]).rows.nbytes
    assert leaf.uniform_nbytes == FOUR.encode(own[0]).rows.nbytes
  assert found.error <= found.uniform_error
  assert found.nbytes < found.uniform_nbytes
  assert len({leaf.codec for leaf in found.leaves}) > 1


def test_a_message_has_the_bytes():
  like = gradients("abcd")
  found = allocated(like)
  tx = gradcomp.policy(found.rules, axis_name="data", exchange="all_gather")
  assert gradcomp.explain(tx, like, workers=2).bytes_sent == found.nbytes


def test_the_uniform_codec_is_the_worst_case():
  found = allocated(gradients("a"))
  assert (found.nbytes, found.error) == (found.uniform_nbytes, found.uniform_error)
  like = gradients("abc")
  assert allocated(like, uniform=Dense()).error == 0
  assert allocated(like, candidates=[]).nbytes == allocated(like).uniform_nbytes


def test_the_order_of_leaves_does_not_matter():
  like = gradients("abcd")
  turned = collections.OrderedDict(reversed(like.items()))
  assert allocated(like) == allocated(turned)
  other = gradients("abcd", seed=1)
  assert allocated(like, other) == allocated(other, like)


NAMES = ("a", "xa", "ax", "a.b", "a-b", "a[0]", "a['b']", 'a"b', "a|xa", "a\n", "^a$")


def test_each_leaf_gets_its_codec_and_no_other():
  names = [*NAMES, "layers/0"]
  found = allocated(gradients(names) | {"layers": [gradients("z", seed=2)["z"] / 1e6]})
  assert len(found.leaves) == len(NAMES) + 1  # two leaves have the path "layers/0"
  assert len({leaf.codec for leaf in found.leaves}) > 1
  for leaf in found.leaves:
    assert found.policy.bind(Leaf(SHAPE, path=leaf.path)) == leaf.codec
  shared = {leaf.path: leaf for leaf in found.leaves}["layers/0"]
  assert shared.elements == 2 * math.prod(SHAPE)


def test_small_leaves_lose_nothing():
  like = gradients("ab") | {"bias": np.ones(7, np.float32)}
  bias = {leaf.path: leaf for leaf in allocated(like).leaves}["bias"]
  assert (bias.error, bias.uniform_error) == (0, 0)


def test_residuals_of_biased_candidates_stay_bounded():
  like = {"a": gradients("a")["a"], "b": gradients("b")["b"] / 1e3}
  found = allocated(like, candidates=[QSGD(bits=2), *WIDTHS])
  for leaf in found.leaves:
    assert leaf.energy == np.sum(like[leaf.path].astype(np.float64) ** 2)
    assert leaf.error < leaf.energy
  low_rank = allocated(like, candidates=[PowerSGD(rank=2), WIDTHS[2]])
  assert [leaf.codec for leaf in low_rank.leaves] == [WIDTHS[2], PowerSGD(rank=2)]
  with pytest.raises(ValueError, match="`uniform` must lose less .* of a it loses"):
    allocated(like, uniform=QSGD(bits=2, norm="l2"), candidates=[OneBit()])


def test_a_box_of_an_array_is_no_part_of_its_path():
  """Rules for a state of flax.nnx match the leaves that an exchange has of it."""
  nnx = pytest.importorskip("flax.nnx")
  params = nnx.state(nnx.Linear(64, 128, rngs=nnx.Rngs(0)), nnx.Param)
  found = allocate([jax.tree.map(jnp.ones_like, params)], candidates=WIDTHS)
  assert [leaf.path for leaf in found.leaves] == ["bias", "kernel"]
  gradcomp.policy(found.rules).init(params)
  link = gradcomp.cost.Link(latency=1e-5, bytes_per_second=1e8)
  options = gradcomp.cost.PlanOptions(candidates=[found.candidate])
  plan = gradcomp.cost.plan(params, workers=4, link=link, budget=0.2, options=options)
  assert "allocated" in str(plan)


def test_complex_and_narrow_leaves():
  wide = gradients("ab")
  like = {"a": wide["a"] + 1j * wide["b"], "b": jnp.asarray(wide["b"], jnp.bfloat16)}
  found = allocated(like)
  assert 0 < found.error <= found.uniform_error


MODES = ["pmap", "explicit"]
MODES += slow("vmap", "shard_map", "shard_map_unchecked", "auto")


@pytest.mark.parametrize("mode", MODES)
def test_each_leaf_is_sent_as_its_codec_sends_it(mode):
  """To the bit, for random bits are of a leaf's name."""
  like = gradients("abc")
  found = allocated(like)
  assert len({leaf.codec for leaf in found.leaves}) > 1
  options = {"axis_name": "data", "exchange": "all_gather"}
  own = {name: np.stack([x, -x / 3, x[::-1], x * 2]) for name, x in like.items()}
  means, _ = modes.mapped(mode, gradcomp.policy(found.rules, **options), 4)(
    own, None, like
  )
  for leaf in found.leaves:
    tx = gradcomp.compress(leaf.codec, **options)
    part = lambda tree, path=leaf.path: {path: tree[path]}
    alone, _ = modes.mapped(mode, tx, 4)(part(own), None, part(like))
    assert_same_bits(part(means), alone)


def test_it_trains_in_a_map():
  like = gradients("abc")
  found = allocated(like)
  tx = optax.chain(gradcomp.policy(found.rules, axis_name="data"), optax.sgd(0.1))
  mesh = jax.make_mesh((2,), ("data",))

  def train(params, data):
    state = tx.init(params)
    for _ in range(2):
      grads = jax.tree.map(lambda p: p - data[0, 0], params)
      updates, state = tx.update(grads, state)
      params = optax.apply_updates(params, updates)
    return jax.tree.map(lambda p: p[None], params)

  specs = dict(in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False)
  step = jax.jit(jax.shard_map(train, mesh=mesh, **specs))
  data = jax.device_put(jnp.arange(2.0)[:, None], NamedSharding(mesh, P("data")))
  trained = step(like, data)
  for name, before in like.items():
    first, second = np.asarray(trained[name])
    np.testing.assert_array_equal(first, second)
    assert np.any(first != before)


@pytest.mark.parametrize(
  ("given", "options", "error"),
  [
    ({"a": np.ones(SHAPE)}, {}, "a list or a tuple of trees .*, got dict"),
    ([], {}, "`gradients` must be .*, got list, empty"),
    ([{"a": np.ones(3)}, {"a": np.ones(4)}], {}, "number 1 has a float32.4., and"),
    ([{"x": {"a": np.full(3, np.nan)}}], {}, "number 0 has nan in x/a"),
    ([{"a": np.ones(3)}], {"candidates": "QSGD"}, "`candidates` must be a sequence"),
    ([{"a": np.ones(3)}], {"candidates": [4]}, "`candidates` must have codecs"),
    ([{"a": np.ones(3)}], {"uniform": 4}, "`uniform` must have codecs"),
  ],
)
def test_errors(given, options, error):
  with pytest.raises(ValueError, match=error):
    allocate(given, **options)
