"""allocate sends the least bytes at the error of a uniform codec, leaf by leaf."""

import collections
import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp
from gradcomp import __main__
from gradcomp._src.codecs.sums.records import Leaf
from gradcomp._src.cost.allocate_search import PARTS, Option, least_bytes
from gradcomp._src.cost.planner.candidates import packaged_speeds
from gradcomp.codecs import QSGD, Dense, OneBit, PowerSGD, Sign
from gradcomp.cost import allocate
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import assert_same_bits
from tests.support.cases.plan import BY_NAME, QSGD4, pair, plan

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


def test_a_bound_may_be_kept_by_none_or_by_ties():
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


def test_the_uniform_codec_is_the_worst_case_and_order_does_not_matter():
  found = allocated(gradients("a"))
  assert (found.nbytes, found.error) == (found.uniform_nbytes, found.uniform_error)
  like, other = gradients("abc"), gradients("abc", seed=1)
  found = allocated(like)
  assert allocated(like, uniform=Dense()).error == 0
  assert allocated(like, candidates=[]).nbytes == found.uniform_nbytes
  assert found == allocated(collections.OrderedDict(reversed(like.items())))
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


def test_small_complex_and_narrow_leaves():
  """Small ones lose nothing."""
  wide = gradients("ab")
  like = {"a": wide["a"] + 1j * wide["b"], "b": jnp.asarray(wide["b"], jnp.bfloat16)}
  found = allocated(like | {"bias": np.ones(7, np.float32)})
  assert 0 < found.error <= found.uniform_error
  bias = {leaf.path: leaf for leaf in found.leaves}["bias"]
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


RANDOM = np.random.default_rng(0)
LIKE = {
  name: scale * RANDOM.normal(size=(512, 512)).astype(np.float32)
  for name, scale in (("a", 1), ("b", 0.01), ("c", 0.01))
}


@pytest.fixture(scope="module")
def found():
  return allocate([LIKE], candidates=[QSGD(bits=bits) for bits in (2, 3, 5)])


def test_a_plan_takes_it_where_it_is_faster(found):
  own = found.candidate
  options = {"budget": "aggressive", "candidates": [*QSGD4, own], "gradients": LIKE}
  planned = plan(LIKE, **options)
  assert pair(planned)[0] == "allocated"
  rows = {x.candidate.name: x for x in planned.rows if x.exchange.name == "all_gather"}
  four, less = rows["QSGD-4"], rows["allocated"]
  assert less.explanation.bytes_sent < four.explanation.bytes_sent
  # The uniform codec's loss is measured by another drawing of bits.
  assert less.error <= four.error * 1.02
  chosen = {x.path: x.codec for x in planned.explanation.leaves}
  assert chosen == {f"['{leaf.path}']": leaf.codec for leaf in found.leaves}


def test_its_speeds_are_those_of_the_nearest_bits(found):
  """Leaves of 2 and 5 bits have the seconds of 4 bits each, where 4 and 8 are known."""
  speeds = {x: packaged_speeds("cpu")[x] for x in ("QSGD-4", "QSGD-8")}
  options = {"budget": "aggressive", "candidates": [found.candidate], "speeds": speeds}
  assert {leaf.codec.bits for leaf in found.leaves} == {2, 5}
  rows = plan(LIKE, **options).rows
  row = next(x for x in rows if x.exchange.name == "all_gather" and x.error)
  at_one_speed = 3 * 512 * 512 * speeds["QSGD-4"].encode
  assert row.predicted.breakdown.encode == pytest.approx(at_one_speed)


def test_it_is_refused_with_a_reason(found):
  (refusal,) = plan(LIKE, candidates=[found.candidate]).refused
  assert "no training of the study" in refusal.reason
  low = allocate([LIKE], candidates=[Sign(), QSGD(bits=5)]).candidate
  assert low.biased and low.feedback
  refused = plan(LIKE, budget="aggressive", candidates=[low]).refused
  assert any("none of a codec like Sign()" in x.reason for x in refused)


def test_the_command_line_reads_gradients(tmp_path, monkeypatch, capsys):
  only = (BY_NAME["QSGD-4"],)
  monkeypatch.setattr(gradcomp.cost, "CANDIDATES", only, raising=False)
  file = tmp_path / "step.npz"
  np.savez(file, **LIKE)
  words = f"plan --gradients {file} --workers 4 --gbit 1 --budget aggressive".split()
  __main__.main(words)
  said = capsys.readouterr().out
  assert "fewer bytes than QSGD()." in said
  assert "compress: allocated" in said
  np.savez(file, a=np.full(3, np.nan))
  wrong = {
    "must be finite, but number 0 has nan in a": words,
    "--gradients, and not both": [*words, "--params", "1e6"],
    "No such file": [*words[:2], "none.npz", *words[3:]],
  }
  for message, given in wrong.items():
    with pytest.raises(SystemExit) as ended:
      __main__.main(given)
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
