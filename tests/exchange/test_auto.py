"""What ``auto`` takes: what sends less, and of equals what encodes once."""

import jax
import jax.numpy as jnp
import pytest

import gradcomp
from gradcomp._src.exchange.auto import choose
from gradcomp._src.exchange.layout import plan_rows
from gradcomp._src.exchange.schedules import AllReduce
from gradcomp.codecs import QSGD, Dense
from gradcomp.exchange import AllGather, Auto, TwoShot


def test_auto_picks_by_facts_workers_and_bytes():
  like = lambda n: [jax.ShapeDtypeStruct((n, n), jnp.float32)]
  small, large = (plan_rows(like(n), QSGD(bits=4)) for n in (64, 1024))
  dense = plan_rows(like(1024), Dense())
  assert choose(Auto(), dense, 8)[0] == AllReduce()
  assert choose(Auto(), large, 2)[0] == AllGather()
  assert choose(Auto(), large, 3)[0] == TwoShot()
  assert choose(Auto(), small, 8)[0] == AllGather()
  assert choose(TwoShot(), small, 8) == (TwoShot(), "asked for")
  # Sums in a format of few bits cannot be psum's.
  casts = gradcomp.aps(axis_name="data", feedback=None)
  (leaf,) = gradcomp.explain(casts, like(512), workers=8).leaves
  assert leaf.exchange in ("two_shot", "all_gather")


def sent(density, exchange, workers):
  like = {"w": jax.ShapeDtypeStruct((1000, 1000), jnp.float32)}
  tx = gradcomp.redsync(density, axis_name="data", exchange=exchange)
  (leaf,) = gradcomp.explain(tx, like, workers=workers).leaves
  return leaf.exchange, float(leaf.bytes_sent)


def test_two_shots_bytes_do_not_grow_with_the_workers():
  """2 (N-1)/N c, and rounding up in N ranges; all_gather's are (N-1) c."""
  assert sent(0.01, "two_shot", 4)[1] == pytest.approx(2 * 3 / 4 * 60_000, rel=0.02)
  assert sent(0.01, "two_shot", 64)[1] < 2 * 60_000 * 1.05
  few, many = (sent(0.01, "all_gather", n)[1] for n in (4, 64))
  assert many == 21 * few


def test_auto_gathers_until_a_plain_mean_sends_less():
  """c N < 8 n: here c is 10,000 entries of 6 bytes and 16 blocks of 4."""
  last = 8_000_000 // 60_064
  assert sent(0.01, "auto", last)[0] == "all_gather"
  assert sent(0.01, "auto", last + 1)[0] == "two_shot"
  assert sent(0.01, "auto", 2)[0] == "all_gather"
  assert sent(0.5, "auto", 8)[0] == "two_shot"
  assert sent(0.7, "auto", 2)[0] == "psum"  # positions make it more than dense
