"""plan chooses what is fastest where it was measured, and says no with a number."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp import cost
from gradcomp._src.cost.planner import choice
from gradcomp._src.cost.planner.candidates import CANDIDATES, Record
from gradcomp._src.cost.planner.choice import best
from gradcomp._src.cost.planner.errors import Errors, mean_error, omega
from gradcomp._src.exchange.schedules import Ring as Ring
from gradcomp.codecs import QSGD, Dense, TopK
from gradcomp.cost import Link
from gradcomp.exchange import AllGather as AllGather
from gradcomp.exchange import TwoShot as TwoShot
from tests.report.texts import fields
from tests.support import modes
from tests.support.cases.plan import BY_NAME, GIGABIT, LIKE, QSGD4, SMALL, pair, plan


def test_sparse_for_many_workers_until_it_is_dense():
  options = dict(workers=64, steps=100_000, budget="aggressive")
  others = [BY_NAME["QSGD-8"], BY_NAME["QSGD-4"]]
  sparse = [BY_NAME["top 0.1 %"], *others]
  found = plan(LIKE, candidates=sparse, **options | {"workers": 16})
  assert pair(found) == ("top 0.1 %", "all_gather")
  denser = BY_NAME["top 1 %"]._replace(codec=TopK(density=0.03), density=0.03)
  found = plan(LIKE, candidates=[denser, *others], **options)
  assert pair(found) == ("QSGD-4", "two_shot")
  (row,) = [x for x in found.rows if x.candidate is denser]
  assert row.exchange.name == "all_gather" and row.speedup < 1
  reasons = {x.way: x.reason for x in found.refused if x.candidate is denser}
  assert "64 workers together choose up to 0.858" in reasons["two_shot"]


REFUSALS = r"""
QSGD-8 | budget="none" | allows no error, and omega is 0\.00011
QSGD-2 fitted | budget="paper" |
QSGD-2 | budget="paper" | it ended -.* adam, 8 workers
QSGD-2 | budget="paper", optimizer="sgd" |
top 0.1 % ASQ | budget="paper", steps=10_000 | the study has no record of it with 3 seed
1-bit | budget="paper" | it ended -.* ± .* points from float32 \(.*\); .* allows 0\.5
1-bit | budget="paper", optimizer="adam" | it ended -.* 8 workers, . seeds
TernGrad | budget="paper" | it ended -.* 8 workers
TernGrad | budget="paper", sizes=(2,), optimizer="adam" | it ended -.* adam, 2 workers
TernGrad | budget="paper", sizes=(8, 8) | it ended -.* sgd, 64 workers
top 1 % | budget="aggressive" |
top 0.1 % | budget="aggressive" | about 1,000 steps; it needs steps=10000
top 0.1 % | budget="aggressive", steps=9999 | 1,000 steps, more than a tenth of 9,999
top 0.1 % | budget="aggressive", steps=10_000 |
"""
# Of a codec, an exchange, a budget and workers.
BUDGETS = r"""
QSGD-8 | Ring(), 8 | "tight" |
QSGD-4 | TwoShot(), 4 | "tight" |
QSGD-4 | TwoShot(), 2 | "tight" | error is 0\.0362, and 0\.0181 over the work
QSGD-4 | Ring(), 4 | "tight" | 0\.0115 over the workers; .* allows 0\.01
1-bit | TwoShot(), 99 | "tight" | error is 0\.581
QSGD-4 | TwoShot(), 512 | "paper" |
QSGD-4 | Ring(), 8 | "paper" | is 0\.0848, and 0\.0362 where it was trained
QSGD-2 fitted | AllGather(), 8 | "paper" |
APS (5, 2) | Ring(), 8 | "paper" |
APS (5, 2) | Ring(), 256 | "paper" | is 0\.363, and 0\.015 where it was trained
QSGD-4 | TwoShot(), 4 | 0.01 |
QSGD-4 | TwoShot(), 4 | 0.008 | 0\.00904 over .*, above the budget of 0\.008
QSGD-2 | Ring(), 512 | "aggressive" |
"""


@pytest.mark.parametrize(("name", "options", "says"), fields(REFUSALS))
def test_every_refusal_has_its_number(name, options, says):
  candidate = BY_NAME[name]
  errors = eval(f"Errors(**dict(sizes=(8,)) | dict({options}))")
  reason = errors.refusal(candidate, candidate.omega)
  assert re.search(says, reason) if says else not reason


@pytest.mark.parametrize(("name", "where", "budget", "says"), fields(BUDGETS))
def test_a_budget_bounds_the_error_of_the_mean(name, where, budget, says):
  """Of codec and exchange and workers: a ring's grows with them."""
  exchange, workers = eval(where)
  candidate, errors = BY_NAME[name], Errors(budget=eval(budget), sizes=(workers,))
  error = mean_error(candidate, candidate.omega, exchange, (workers,))
  reason = errors.excess(candidate, candidate.omega, error)
  assert re.search(says, reason) if says else not reason


def mark(task, points, *, half=0.1, workers=8, optimizer="sgd", seeds=3):
  return Record(task, optimizer, workers, seeds, points, half)


def test_the_records_that_decide_are_the_nearest_of_each_task():
  """The optimizer comes first, then workers; and two seeds say nothing."""
  sgd = [mark("net", -n, workers=n) for n in (2, 8, 64)]
  text = mark("text", -3.0, workers=32)
  adam = mark("net", -20.0, workers=64, optimizer="adam")
  every = [*sgd, adam, text, mark("net", -99.0, seeds=2)]
  having = lambda x: QSGD4[0]._replace(records=x)
  deciding = lambda x, n, by: Errors("paper", (n,), optimizer=by).deciding(having(x))
  assert deciding(every, 8, "sgd") == [sgd[1], text]
  assert deciding(every, 5, "sgd") == [sgd[1], text]
  assert deciding(every, 3, None) == [text, sgd[0]]
  assert deciding(every, 8, "adam") == [adam, text]
  assert deciding(every, 999, None) == [sgd[2], adam, text]
  wide = mark("other", -17.05, half=20.49)
  assert deciding([wide, *every], 8, "sgd") == [wide, sgd[1], text]
  assert deciding([mark("net", -9.0, seeds=2)], 8, None) == []


def test_a_loss_is_one_that_all_of_the_interval_shows():
  refused = []
  for points, half in [(-0.51, 0.5), (-0.49, 0.1), (-1, 0.99), (-1, 1.1), (-17, 20.5)]:
    records = mark("net", points, half=half), mark("other", 0.1)
    candidate = QSGD4[0]._replace(records=records)
    refused.append(bool(Errors("paper", (8,)).refusal(candidate, 0.036)))
  assert refused == [True, False, True, False, False]


def test_a_plan_says_of_which_training_it_knows():
  """Far records decide as well, and a note names those that have no others."""
  far = QSGD4[0]._replace(records=(mark("net", 0.2, workers=64),))
  given = dict(budget="paper", candidates=[far, BY_NAME["1-bit"]])
  says = "QSGD-4 in the study, at worst: +0.20 ± 0.10 points from float32 (net, sgd"
  for options, where in [
    ({"workers": 8}, "No record with 4 to 16 workers: QSGD-4."),
    ({"optimizer": "adam"}, "No record by adam with 2 to 8 workers: QSGD-4."),
    ({"workers": 31, "optimizer": "sgd"}, "No record by sgd with 16 to 62 workers: "),
    ({"workers": 32, "optimizer": "sgd"}, ""),
  ]:
    found = plan(LIKE, **given, **options)
    assert pair(found)[0] == "QSGD-4" and says in str(found)
    assert (where or "in the study") in str(found)
    assert bool(where) == ("No record" in str(found))
  assert "in the study" not in str(plan(LIKE, budget="tight", candidates=[far]))


@pytest.mark.parametrize("workers", [2, 8, 64])
@pytest.mark.parametrize("optimizer", [None, "sgd", "adam"])
def test_what_the_study_found_worse_is_never_recommended(workers, optimizer):
  """1-bit SGD, which it found 4 points below and more, was the default at 0.1."""
  link = Link(latency=50e-6, bytes_per_second=0.1e9 / 8)
  every = dict(candidates=CANDIDATES, steps=100_000)
  found = plan(LIKE, workers=workers, link=link, optimizer=optimizer, **every)
  assert found.verdict.startswith("compress: ")
  names = {x.candidate.name for x in found.rows}
  assert not names & {"1-bit", "TernGrad", "top 1 %", "top 0.1 %", "top 0.1 % ASQ"}
  assert optimizer == "sgd" or "QSGD-2" not in names
  assert "refused 1-bit: it ended -" in str(found)


def test_biased_codecs_need_residuals_and_all_residuals_must_shrink():
  """With 2 bits of an unbiased codec they grow to 17 times the gradient's energy."""
  errors = Errors(budget="aggressive", sizes=(4,))
  biased = BY_NAME["1-bit"]._replace(feedback=False)
  assert "keeps no residual" in errors.refusal(biased, 0.353)
  assert "a residual would grow" in errors.refusal(BY_NAME["1-bit"], 1.2)
  alone = BY_NAME["QSGD-2"]
  assert not errors.refusal(alone, alone.omega)
  kept = alone._replace(feedback=True)
  assert "a residual would grow" in errors.refusal(kept, alone.omega)
  tx = gradcomp.qsgd(bits=2, bucket_size=128, feedback="error", min_leaf_size=0)
  state, update = tx.init(jnp.zeros(2**15)), jax.jit(tx.update)
  for i in range(20):
    _, state = update(jax.random.normal(jax.random.key(i), (2**15,)), state)
  assert jnp.mean(state.residual**2) > 10


@pytest.mark.parametrize("name", ["bfloat16", "QSGD-2 fitted", "1-bit", "APS (5, 2)"])
def test_errors_in_the_table_are_those_of_normal_numbers(name):
  candidate = BY_NAME[name]
  assert omega(candidate.codec) == pytest.approx(candidate.omega, rel=0.03)


def test_errors_are_measured_wherever_gradients_are_float32_numbers():
  """Buckets of ones are exact with a scale, so that 4 bits lose nothing."""
  x = np.random.default_rng(0).standard_normal(8192).astype(np.float32)
  codec = BY_NAME["QSGD-4"].codec
  found = [omega(codec, [x * np.float32(2.0**power)]) for power in (-90, 0, 100)]
  assert found[0] == found[1] == found[2] > 0
  like = {"w": jnp.ones((64, 512))}
  found = plan(like, gradients=like, budget=1e-6)
  assert found.chosen.error == 0.0 and found.verdict.startswith("compress: QSGD-4 ")
  assert any("the loss of the gradients" in note for note in found.notes)


def test_of_equal_times_the_smaller_error_and_then_the_simpler_exchange():
  rows = {row.exchange.name: row for row in plan(budget="aggressive").rows}
  row = rows["two_shot"]
  fast = row._replace(error=0.5, step_seconds=1.0)
  exact = row._replace(error=0.1, step_seconds=1.019)
  simple = rows["all_gather"]._replace(error=0.1, step_seconds=1.01)
  rings = rows["ring"]._replace(error=0.1, step_seconds=1.0)
  late = row._replace(error=0.0, step_seconds=1.021)
  assert best([fast, rings, exact, simple, late]) is simple
  assert best([fast, late]) is fast


def test_a_gain_below_the_margin_is_no_gain():
  found = plan(forward=10.0, backward=20.0)
  assert pair(found) == ("float32", "psum")
  assert re.search(r"gains 0\.0% of a step here, below the margin of 5%", found.verdict)
  assert plan(forward=10.0, backward=20.0, margin=0.0).chosen is not found.chosen
  assert "without overlap" in str(found)
  (plain, *_) = found.rows
  assert found.chosen is plain and plain.speedup == 1.0
  assert plain.step_seconds > 30.0


def test_what_is_printed():
  """A line a row, one a refusal, what the numbers do not say, and one verdict."""
  found = plan(LIKE, candidates=[*QSGD4, BY_NAME["top 0.1 %"]])
  lines = str(found).splitlines()
  assert lines[0].split("  ")[0] == "codec" and lines[0].endswith("speed-up  error")
  numbers = r"12,779,520 +10\.3 +102\.5 +4\.1 +116\.9 +6\.89 +0\.036"
  assert re.fullmatch(rf"QSGD-4 +two_shot +{numbers}", lines[1])
  for words in ("refused top 0.1 %:", "passes of a step are", "Accuracy is not meas"):
    assert sum(words in line for line in lines) == 1
  assert lines[-1] == found.verdict
  assert found.explanation.bytes_sent == 12_779_520
  assert found.chosen.step_seconds == found.chosen.breakdown.total
  half = plan(LIKE, candidates=[BY_NAME["bfloat16"]])
  assert half.verdict.startswith("send bfloat16: bfloat16 two_shot ")


def test_dense_is_a_plain_mean_and_a_counter():
  """Where nothing is gained, the program has no more than a pmean of each leaf."""
  tx = gradcomp.cost.plan({"w": jnp.zeros(9)}, workers=1, link=GIGABIT).transformation
  tree = {"b": jnp.zeros(9), "w": jnp.zeros((64, 512))}
  mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
  specs = dict(mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
  dense, programs = tx(axis_name="data"), []
  for mean in (lambda x, s: (jax.lax.pmean(x, "data"), s), dense.update):
    over = jax.jit(jax.shard_map(mean, **specs))
    text = over.lower(tree, dense.init(tree)).compile().as_text()
    found = re.findall(r"= (\(.*\)|\S+) ([a-z-]+)\(", text)
    programs.append(collections.Counter(found))
  plain, ours = programs
  assert sum(count for (_, name), count in plain.items() if name == "all-reduce") == 1
  more = {shape.partition("{")[0] for shape, _ in ours - plain}
  assert more <= {"s32[]", "pred[]", "u32[2]"}  # the step, and the key


def test_one_worker_and_one_memory_send_float32():
  devices = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
  for options, reason in [
    ({"workers": 1}, "one worker sends nothing"),
    ({"link": devices}, "emulated devices share one memory"),
    ({"budget": "none"}, "of 1 candidates none is allowed"),
    ({"budget": 1e-4}, "of 1 candidates none is allowed"),
  ]:
    found = plan(**options)
    assert found.verdict.startswith(f"do not: {reason}")
    assert pair(found) == ("float32", "psum")
    assert {x.candidate.name for x in found.refused} <= {"QSGD-4"}
  (refusal,) = [x for x in found.refused if not x.way]
  assert "the mean's error is 0.018" in refusal.reason


def test_codecs_without_a_speed_are_refused():
  codec = QSGD(bits=6)
  found = plan(candidates=[codec, *QSGD4], budget="tight")
  assert pair(found)[0] == "QSGD-4"
  (refusal,) = [x for x in found.refused if not x.way]
  assert refusal.name == "QSGD(bits=6)" and "`speeds` has none" in refusal.reason
  one = cost.CodecSpeed(encode=1e-10, decode=1e-10, add=1e-11)
  for given in (one, {"QSGD(bits=6)": one}, lambda codec: one):
    found = plan(candidates=[codec], speeds=given, budget="tight")
    assert pair(found)[0] == "QSGD(bits=6)"


def test_the_last_layer_stays_dense_where_the_paper_says_so():
  params = SMALL | {"head": {"kernel": jax.ShapeDtypeStruct((64, 256), jnp.float32)}}
  found = plan(params, candidates=[BY_NAME["TernGrad"]], budget="aggressive")
  assert pair(found)[0] == "TernGrad"
  assert [leaf.codec == Dense() for leaf in found.explanation.leaves] == [True, False]


def test_a_choice_that_cannot_be_traced_is_refused(monkeypatch):
  """Then the next one is traced."""

  def explain(tx, *args, **options):
    found = gradcomp.explain(tx, *args, **options)
    if found.leaves[0].exchange == "two_shot":
      raise ValueError("it cannot be traced")
    return found

  monkeypatch.setattr(choice, "explain", explain)
  found = plan(LIKE)
  assert pair(found) == ("QSGD-4", "all_gather")
  assert {x.way: x.reason for x in found.refused}["two_shot"] == "it cannot be traced"


def test_the_transformation_has_the_mean_of_the_plan():
  tx = plan(workers=8, budget="aggressive").transformation(axis_name="data")
  given = np.random.default_rng(0).standard_normal((8, 64, 512)).astype(np.float32)
  (output,), _ = modes.run("vmap", tx, [{"w": given}])
  assert (output["w"] == output["w"][:1]).all()
  mean = given.mean(axis=0)
  assert 0 < np.square(output["w"][0] - mean).sum() / np.square(mean).sum() < 0.1


def test_between_groups_a_plain_mean_adds_inside_first():
  """As XLA's all-reduces between slices and NCCL's between hosts do."""
  fast = Link(latency=1e-6, bytes_per_second=200e9)
  found = plan(LIKE, workers=(2, 4), link=(GIGABIT, fast))
  plain, *others = found.rows
  assert plain.name == "float32 hierarchical" and plain.speedup == 1
  # Of the bytes of a flat mean, 2 (N-1)/N, a chip sends 2 (H-1)/H in a quarter. Sums
  # inside take time.
  took, flat = (x.step_seconds for x in (plain, plan(LIKE, workers=8).rows[0]))
  assert flat / took == pytest.approx((7 / 8) / (1 / 2 / 4), rel=0.02)
  for row in others:
    gain = took / row.step_seconds
    assert row.speedup == pytest.approx(gain)
  # With links that are all alike the flat one is faster.
  alike = plan(LIKE, workers=(2, 4), link=(GIGABIT, GIGABIT))
  assert alike.rows[0].name == "float32 psum"


def test_a_refusal_between_groups_names_the_rate_at_which_both_are_equal():
  inside = Link(latency=0, bytes_per_second=200e9)
  outer = Link(latency=0, bytes_per_second=100e9)
  found = plan(LIKE, workers=(2, 4), link=(outer, inside))
  assert found.verdict.startswith("do not: compression loses here")
  rate = float(re.search(r"win below ([\d.]+) Gbit/s", found.verdict)[1])
  at = Link(latency=0, bytes_per_second=rate * 1e9 / 8)
  again = plan(LIKE, workers=(2, 4), link=(at, inside))
  plain, *others = (row.step_seconds for row in again.rows)
  assert min(others) == pytest.approx(plain, rel=0.01)  # of three digits
