"""Bytes and collectives that a plan states from shapes are those of a traced update."""

import collections
import itertools
import math

import jax
import jax.numpy as jnp
import pytest

import gradcomp
from gradcomp._src.core.compression import Compression
from gradcomp._src.cost.planner.sent import sent_by
from gradcomp._src.exchange import collectives as calls
from gradcomp._src.mesh.study import planned_for
from gradcomp._src.mesh.types import Place
from gradcomp.codecs import QSGD, Dense, FloatCast, Ternary, TopK
from tests.table import settings

CODECS = list(dict.fromkeys(case.codec for case in settings.CASES))
# Of codecs that fit levels, share scales, choose, and ride with partial sums.
FEW = [QSGD(bits=2, levels="nonuniform"), Ternary(), TopK(density=0.01)]
FEW += [FloatCast(accumulate="kahan"), Dense(dtype=jnp.bfloat16)]
WAYS = ("psum", "all_gather", "two_shot", "ring", "hierarchical", "auto")
SHAPES = [(7,), (300, 301), (5000,), (0, 3), (4096, 77), (64, 1024)]
LEAVES = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES]


def told(collected):
  """The times of equal collectives."""
  counts = collections.Counter()
  for x in collected:
    counts[x.message, x.kind, x.workers, x.span, x.bytes_in] += x.times
  return +counts


def alike(codec, way, workers, leaves=LEAVES, platform=None, message_bytes=None):
  """Compares both for a codec and an exchange; False if they do not go together."""
  sizes = workers if isinstance(workers, tuple) else (workers,)
  axis, n = ("host", "chip") if len(sizes) > 1 else "host", math.prod(sizes)
  feedback = "error" if codec.facts.needs_feedback else None
  options = dict(axis_name=axis, exchange=way, feedback=feedback)
  options["message_bytes"] = message_bytes
  try:
    parts = Compression(codec, **options)
  except ValueError:
    return False
  place = Place(axis, n, others=[()] * len(leaves))
  with planned_for(platform):
    plan = parts.plan(leaves, place)
    leaves_of, collected, fitting = sent_by(plan, sizes)
  tx = gradcomp.compress(codec, **options)
  traced = gradcomp.explain(tx, leaves, workers=workers, platform=platform)
  assert told(collected) == told(traced.collectives)
  sent = sum((x.times * x.exact_bytes_sent for x in collected), fitting)
  assert (math.ceil(sent), fitting) == (traced.bytes_sent, traced.bytes_fitting)
  work = [(x.codec, x.elements, x.work, x.keeps) for x in traced.leaves]
  assert {*map(repr, leaves_of)} == {*map(repr, work)}
  return True


@pytest.mark.parametrize(
  "codecs, workers",
  [
    *(pytest.param([x], (2, 3), id=type(x).__name__) for x in FEW),
    *(pytest.param(CODECS, n, marks=pytest.mark.slow) for n in (1, 2, 3, 4, (3, 2))),
  ],
)
def test_they_are_told_from_shapes(codecs, workers):
  assert sum(itertools.starmap(alike, itertools.product(codecs, WAYS, [workers]))) > 2


def test_so_are_messages_of_accelerators_and_of_processes(monkeypatch):
  """Beside CPUs messages are cut, and between processes lines go in rounds."""
  large = [jax.ShapeDtypeStruct((2**22,), jnp.float32)] * 6
  assert alike(QSGD(bits=4), "two_shot", 4, large, "tpu", "auto")
  assert alike(QSGD(bits=4), "hierarchical", (2, 2), large)  # in pieces
  narrow = [*LEAVES, jax.ShapeDtypeStruct((70, 70), jnp.bfloat16)]
  assert alike(QSGD(bits=4, share_scale=True), "auto", 3, narrow, message_bytes=2**15)
  monkeypatch.setattr(calls, "over_gloo", lambda: True)
  for workers in (4, 6, (3, 5)):
    assert alike(QSGD(bits=4), "two_shot", workers)
