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
from gradcomp._src.cost.allocate import PARTS, least_bytes
from gradcomp._src.cost.planner.candidates import packaged_speeds
from gradcomp.codecs import QSGD, Dense, Sign
from gradcomp.cost import allocate
from tests.errors import table
from tests.support.cases.plan import BY_NAME, QSGD4, pair, plan

Option = collections.namedtuple("Option", "nbytes error")
WIDTHS = [QSGD(bits=bits, rounding="nearest") for bits in (2, 4, 5, 8)]
FOUR = WIDTHS[1]
SHAPE = (64, 128)  # whole tiles at 2 and 4 bits


def gradients(names, *, seed=0, shape=SHAPE):
  """Makes leaves whose sizes of numbers differ by powers of 16."""
  rng = np.random.default_rng(seed)
  normal = lambda n: (16.0**-n * rng.standard_normal(shape)).astype(np.float32)
  return {name: normal(n) for n, name in enumerate(names)}


def allocated(*trees, **options):
  return allocate(trees, **{"uniform": FOUR, "candidates": WIDTHS} | options)


def fewest(leaves, bound):
  """Returns the fewest bytes of all choices within a bound, by trying each."""
  exact = lambda choice: sum(Fraction(option.error) for option in choice)
  found = (choice for choice in itertools.product(*leaves) if exact(choice) <= bound)
  return min(sum(option.nbytes for option in choice) for choice in found)


def problem(rng):
  """Makes four leaves with five options each; bytes fall as errors rise."""
  leaves = []
  for _ in range(4):
    errors, sizes = np.sort(rng.lognormal(0, 2, 5)), np.sort(rng.integers(0, 1000, 5))
    pairs = zip(sizes[::-1], errors, strict=True)
    leaves.append([Option(int(n), float(e)) for n, e in pairs])
  return leaves, math.fsum(options[2].error for options in leaves)


def test_no_choice_sends_fewer_bytes():
  """And a bound may be kept by none or by ties."""
  for seed in range(12):
    leaves, bound = problem(np.random.default_rng(seed))
    numbers = least_bytes(leaves, bound)
    chosen = [options[n] for options, n in zip(leaves, numbers, strict=True)]
    assert sum(Fraction(x.error) for x in chosen) <= Fraction(bound)
    sent, gap = sum(x.nbytes for x in chosen), Fraction(len(leaves), PARTS)
    assert fewest(leaves, Fraction(bound)) <= sent
    assert sent <= fewest(leaves, Fraction(bound) * (1 - gap))
  assert least_bytes([[Option(1, 2.0)]], 1.0) is None
  assert least_bytes([[Option(1, 2.0), Option(5, 0.0)]], 0.0) == [1]
  assert least_bytes([[Option(3, 0.0), Option(3, 0.5)]], 1.0) == [0]


def test_errors_and_bytes_are_those_of_the_payloads():
  """Nearest rounding, so that a codec alone shows each error, added over steps."""
  steps = [gradients("abc", seed=seed) for seed in (0, 1)]
  found = allocated(*steps)
  double = lambda x: np.asarray(x, np.float64)
  lost = lambda codec, x: np.sum((double(codec.roundtrip(x)) - double(x)) ** 2)
  for leaf in found.leaves:
    own = [step[leaf.path] for step in steps]
    assert leaf.error == math.fsum(lost(leaf.codec, x) for x in own)
    assert leaf.uniform_error == math.fsum(lost(FOUR, x) for x in own)
    assert leaf.nbytes == leaf.codec.encode(own[0]).rows.nbytes
    assert leaf.uniform_nbytes == FOUR.encode(own[0]).rows.nbytes
  total = found.total
  assert total.error <= total.uniform_error and total.nbytes < total.uniform_nbytes
  assert len({leaf.codec for leaf in found.leaves}) > 1
  tx = gradcomp.policy(found.rules, axis_name="data", exchange="all_gather")
  assert gradcomp.explain(tx, steps[0], workers=2).bytes_sent == total.nbytes


def test_the_uniform_codec_is_the_worst_case_and_order_does_not_matter():
  found = allocated(gradients("a")).total
  assert (found.nbytes, found.error) == (found.uniform_nbytes, found.uniform_error)
  like, other = gradients("abc"), gradients("abc", seed=1)
  found = allocated(like)
  assert allocated(like, uniform=Dense()).total.error == 0
  assert allocated(like, candidates=[]).total.nbytes == found.total.uniform_nbytes
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
  assert 0 < found.total.error <= found.total.uniform_error
  bias = {leaf.path: leaf for leaf in found.leaves}["bias"]
  assert (bias.error, bias.uniform_error) == (0, 0)


def test_residuals_of_biased_candidates_stay_bounded():
  found = allocated(BIASED, candidates=[QSGD(bits=2), *WIDTHS])
  for leaf in found.leaves:
    assert leaf.energy == np.sum(BIASED[leaf.path].astype(np.float64) ** 2)
    assert leaf.error < leaf.energy


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


ROWS = """
allocate({"a": np.ones(SHAPE)}) ->
  `gradients` must be ... a list or a tuple of trees ... , got dict
allocate([]) -> `gradients` must be ... , got list, empty
allocate([{"a": np.ones(3)}, {"a": np.ones(4)}]) ->
  `gradients` ... number 1 has a float32
allocate([{"x": {"a": np.full(3, np.nan)}}]) ->
  `gradients` ... number 0 has nan in x/a
allocate([{"a": np.ones(3)}], candidates="QSGD") -> `candidates` must be a sequence
allocate([{"a": np.ones(3)}], candidates=[4]) -> `candidates` must have codecs
allocate([{"a": np.ones(3)}], uniform=4) -> `uniform` must have codecs
allocated(BIASED, uniform=QSGD(bits=2, norm="l2"), candidates=[OneBit()]) ->
  `uniform` must lose less ... got a loss of ... of a;
"""
BIASED = {"a": gradients("a")["a"], "b": gradients("b")["b"] / 1e3}
test_errors = table.refused(ROWS, globals())


(RANDOM,) = gradients("a", shape=(512, 512)).values()
LIKE = {"a": RANDOM, "b": RANDOM[::-1] / 100, "c": RANDOM.T / 100}


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
  assert less.bytes_sent < four.bytes_sent
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
  assert row.breakdown.encode == pytest.approx(at_one_speed)


def test_it_is_refused_with_a_reason(found):
  (refusal,) = plan(LIKE, candidates=[found.candidate]).refused
  assert "the study has no record of it" in refusal.reason
  low = allocate([LIKE], candidates=[Sign(), QSGD(bits=5)]).candidate
  assert low.biased and low.feedback
  refused = plan(LIKE, budget="aggressive", candidates=[low]).refused
  assert any("none of a codec like Sign()" in x.reason for x in refused)


def test_the_command_line_reads_gradients(tmp_path, monkeypatch, capsys):
  only = (BY_NAME["QSGD-4"],)
  monkeypatch.setattr(__main__.candidates, "CANDIDATES", only)
  file = tmp_path / "step.npz"
  np.savez(file, **LIKE)
  words = f"plan --gradients {file} --workers 4 --gbit 1 --budget aggressive".split()
  __main__.main(words)
  said = capsys.readouterr().out
  assert "fewer bytes than QSGD()." in said and "compress: allocated" in said
  np.savez(file, a=np.full(3, np.nan))
  for message, given in {
    "must be finite, but number 0 has nan in a": words,
    "--gradients, and not both": [*words, "--params", "1e6"],
    "No such file": [*words[:2], "none.npz", *words[3:]],
  }.items():
    with pytest.raises(SystemExit, match="2"):
      __main__.main(given)
    assert message in " ".join(capsys.readouterr().err.split())
