"""Seconds of exchanges and of steps are those of arithmetic by hand."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradcomp
from gradcomp import cost
from gradcomp.cost import Cluster, Link
from gradcomp.exchange import Hierarchical
from tests.support.cases import cost as cases
from tests.support.cases.cost import FREE, LINK, SIZE, SPEED, explain, message, seconds

FOUR = Cluster(workers=4, link=LINK)
GROUPS = Hierarchical(group_size=2)
approx = pytest.approx


def like(*sizes):
  """Leaves of these many elements."""
  return {f"w{i}": jax.ShapeDtypeStruct((n,), jnp.float32) for i, n in enumerate(sizes)}


def test_seconds_of_each_exchange_by_hand():
  """m encodings, N payloads of c bytes: the table of the papers' notes."""
  m, c, n = SIZE, cases.PAYLOAD, 4
  byte = 1 / LINK.bytes_per_second
  gather = lambda nbytes: (n - 1) * (1e-3 + nbytes * byte)
  sums = 4 * m // 512, m  # a scale a bucket, and codes as bytes
  both = sum(cost.collective_seconds("all_reduce", x, n, LINK) for x in sums)
  inside, between = (1e-3 + x * byte for x in (4 * m / 2, c / 4))
  shares = (n - 1) * (1e-3 + c / n * byte)
  grouped = inside + between + gather(c / n)
  # Seconds of encoding, adding and decoding an element in millionths, and of the wire.
  for exchange, options, parts, wire in [
    ("all_gather", {}, (1, n * 3, 0), gather(c)),
    ("two_shot", {}, (1 + 1 / n, 3, 2), shares + gather(c / n)),
    ("ring", {}, (1, 0, 2 * (2 - 1 / n)), shares + gather(c / n)),
    ("psum", {"share_scale": True}, (1, 0, 2 * 2), both),
    (GROUPS, {"add": 7e-6}, (1 / 2 + 1 / 4, (3 + 7) / 2, 2), grouped),
  ]:
    found = seconds(n, exchange, **options)
    assert cases.codec(found) == approx(tuple(m * 1e-6 * x for x in parts))
    assert found.wire_seconds == approx(wire)
  assert seconds(n, "all_gather").wire == (("all_gather", 3 * c, approx(gather(c))),)
  assert seconds(n).bytes_sent == 2 * 3 / 4 * c == explain(n).bytes_sent
  # What workers keep takes time.
  plain, kept = seconds(n), seconds(n, feedback="error")
  assert kept.encode == approx(6 * plain.encode) and kept.wire == plain.wire


def test_a_plain_mean_costs_no_codec_and_one_message():
  """XLA joins the sums of leaves, so that the latency counts once."""
  cluster = Cluster(workers=4, link=LINK, add=1e-9)
  for leaves in (cases.LIKE, like(*[SIZE // 4] * 4)):
    explanation = gradcomp.explain(gradcomp.dense(axis_name="data"), leaves, workers=4)
    found = cost.exchange_seconds(explanation, cluster, SPEED)
    assert found == cost.dense_seconds(SIZE, cluster)
    assert found.codec_seconds == 0
    assert found.total == approx(6e-3 + 1.5 * 4 * SIZE * 1e-6 + 0.75 * SIZE * 1e-9)


@pytest.mark.parametrize("exchange", ["all_gather", "two_shot", "ring"])
def test_of_bytes_all_that_explain_counts_are_timed(exchange):
  tx = gradcomp.qsgd(bits=4, axis_name="data", exchange=exchange, message_bytes=1024)
  explanation = gradcomp.explain(tx, like(SIZE, 77), workers=3)
  cluster = Cluster(workers=3, link=LINK)
  whole = cost.exchange_seconds(explanation, cluster, SPEED)
  assert whole.bytes_sent == explanation.bytes_sent
  parts = cost.message_seconds(explanation, cluster, SPEED)
  assert len(parts) == explanation.messages == 2
  assert sum(part.total for part in parts) == approx(whole.total)


def test_one_worker_sends_nothing_and_a_fast_link_takes_no_time():
  assert seconds(1, "two_shot").wire_seconds == 0
  still = dataclasses.replace(LINK, latency=0.0)
  twice = dataclasses.replace(still, bytes_per_second=2e6)
  for exchange in ("all_gather", "two_shot", "ring", GROUPS):
    slow, fast = (seconds(4, exchange, link=x).wire_seconds for x in (still, twice))
    assert slow == approx(2 * fast) and fast > 0


def test_groups_have_a_link_of_their_own():
  """What stays inside takes it: over a second axis, and in groups of one axis."""
  inside = Link(latency=0.0, bytes_per_second=1e12)
  cluster = Cluster(workers=8, link=LINK, inside=inside, group_size=2)
  over_two = {"axis_name": ("host", "chip"), "exchange": "hierarchical"}
  for workers, options, count in [((4, 2), over_two, 2), (8, {"exchange": GROUPS}, 1)]:
    found = cost.exchange_seconds(explain(workers, **options), cluster, FREE)
    fast = [nbytes for _, nbytes, time in found.wire if time < 1e-3]
    assert fast[0] == 4 * SIZE / 2  # float32, to the one other worker
    assert len(fast) == count
    assert found.total < seconds(workers, speed=FREE, **options).total / 2


def test_each_codec_has_its_own_speed():
  """And one that sends other arrays encodes its leaf once."""
  tx = gradcomp.powersgd(rank=2, axis_name="data", min_leaf_size=0)
  explanation = gradcomp.explain(tx, cases.LIKE, workers=4)
  found = cost.exchange_seconds(explanation, FOUR, SPEED)
  assert cases.codec(found) == approx((SIZE * (1e-6 + 5e-6), 0, SIZE * 2e-6))
  assert [kind for kind, _, _ in found.wire] == ["all_reduce", "all_reduce"]
  fast, slow = (gradcomp.codecs.QSGD(bits=bits) for bits in (8, 2))
  rules = [("w0", fast), (".*", slow)]
  tx = gradcomp.policy(rules, axis_name="data", exchange="ring")
  explanation = gradcomp.explain(tx, like(SIZE, SIZE), workers=4)
  speeds = {fast: FREE, slow: SPEED}.__getitem__
  found = cost.exchange_seconds(explanation, FOUR, speeds)
  assert found.encode == approx(SIZE * 1e-6)


def test_steps_overlap_by_hand():
  """Half of the backward pass of 4 s hides a message of 1 s, and a part of one of 5."""
  short, long = [(0.5, message(wire=1.0))], [(0.5, message(wire=5.0))]
  # The codec stalls the device, and the second message waits for the first.
  stalled = [(0.5, message(codec=1.0, wire=5.0)), (1.0, message(codec=1.0, wire=1.0))]
  cases = [(short, 7, 6), (long, 11, 9), ([], 6, 6), (stalled, 14, 11)]
  for messages, *expected in cases:
    for overlap in (False, True):
      found = cost.step_seconds(2.0, 4.0, messages, overlap=overlap)
      assert found == expected[overlap]


shares = st.tuples(st.floats(0, 1), st.floats(0, 9), st.floats(0, 9))


@settings(max_examples=50, deadline=None)
@given(st.floats(0, 9), st.floats(0, 9), st.lists(shares, max_size=4))
def test_overlap_hides_no_work_and_adds_none(forward, backward, drawn):
  messages = [(share, message(codec, wire)) for share, codec, wire in sorted(drawn)]
  compute = forward + backward + sum(x.codec_seconds for _, x in messages)
  wire = sum(x.wire_seconds for _, x in messages)
  hidden = cost.step_seconds(forward, backward, messages, overlap=True)
  serial = cost.step_seconds(forward, backward, messages, overlap=False)
  assert max(compute, forward + wire) <= hidden + 1e-9
  assert hidden <= serial + 1e-9
  assert serial == approx(compute + wire)


def test_the_crossover_rate_by_hand():
  """Dense bytes less sent bytes, over the codec's seconds; both take equally long."""
  link, explanation = Link(latency=0.0, bytes_per_second=1e6), explain(4)
  rate = cost.crossover_rate(explanation, Cluster(workers=4, link=link), SPEED)
  saved = 1.5 * 4 * SIZE - explanation.bytes_sent
  assert rate == approx(saved / (SIZE * (1.25e-6 + 2e-6 + 3e-6)))
  there = Link(latency=1e-3, bytes_per_second=123.0, factor={("all_to_all", 4): 1.7})
  rate = cost.crossover_rate(explanation, Cluster(workers=4, link=there), SPEED)
  at = Cluster(workers=4, link=dataclasses.replace(there, bytes_per_second=rate))
  equal = cost.exchange_seconds(explanation, at, SPEED).total
  assert equal == approx(cost.dense_seconds(SIZE, at).total)
  many = Cluster(workers=16, link=LINK)
  gathered = explain(16, "all_gather")  # 15 payloads of an eighth: more than dense
  assert cost.crossover_rate(gathered, many, SPEED) == 0
  assert cost.crossover_rate(explain(16), many, FREE) == math.inf


def test_a_number_of_workers_at_which_a_plain_mean_wins():
  explanations = [explain(n, "all_gather") for n in (1, 2, 4, 8, 16, 32)]
  alone = Cluster(workers=1, link=LINK)
  # (N-1) c bytes against 2 (N-1)/N 4 m: about N = 8 m / c = 15.75.
  still = Cluster(workers=1, link=dataclasses.replace(LINK, latency=0.0))
  assert cost.crossover_workers(explanations[1:], still, FREE) == 16
  assert cost.crossover_workers(explanations[1:3], alone, FREE) is None
