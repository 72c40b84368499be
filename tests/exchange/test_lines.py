"""A line of a message holds its rows as the page says, and in whole lanes if long."""

import math

import jax
import numpy as np
import pytest

import gradcomp
from gradcomp._src.exchange import collectives
from gradcomp.codecs import QSGD
from tests.specs.lines import LEAST, split_line
from tests.support import laws, modes
from tests.support.assertions import assert_same_bits

SHAPES = {
  "short": [(3, 520), (6, 128)],
  "one word less": [(1, LEAST - 1)],
  "just long": [(1, LEAST)],
  "codes and scales": [(30, 520), (4, 128)],
  "narrow rows": [(400, 40), (0, 130), (7, 1)],
  "one long row": [(1, 45_003), (1, 900)],
  "more columns than are cut": [(3, 33 * 128 + 5), (2, 700)],
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_lines_are_those_of_the_page(shapes):
  rng = np.random.default_rng(0)
  parts = [rng.integers(1, 2**32, (2, *shape), np.uint32) for shape in shapes]

  @jax.jit
  def there_and_back(parts):
    joined = collectives.join(parts)
    return joined, collectives.split(joined, shapes)

  joined, split = jax.device_get(there_and_back(parts))
  told = zip(*(split_line(line, shapes) for line in joined), strict=True)
  assert_same_bits([np.stack(both) for both in told], parts)
  assert_same_bits([*split], parts)
  words = sum(map(math.prod, shapes))
  assert joined[0].size < 1.01 * words
  assert joined[0].size == words or joined.shape[2] == 128


@pytest.mark.parametrize("exchange", ["all_gather", "two_shot", "ring", "hierarchical"])
@pytest.mark.parametrize("elements", [40_000, 4_000_001])
def test_long_lines_travel_in_lanes(exchange, elements):
  """Read from a trace, of what each worker sends to another at once."""
  tx = gradcomp.qsgd(bits=4, axis_name="data", exchange=modes.grouped(exchange))
  params = {"b": np.zeros(100), "w": jax.ShapeDtypeStruct((elements,), "float32")}
  found = gradcomp.explain(tx, params, workers=4)
  assert found.collectives
  for one in found.collectives:
    ((dtype, shape),) = one.operands
    line = shape[1:] if one.kind == "all-to-all" else shape
    assert dtype == "u32"
    assert math.prod(line) < LEAST or line[1:] == (128,), (one.kind, shape)
  # A device of a ring sends 2 (N-1)/N payloads of 4 bits and 8 scales a tile of 4,096.
  words = 520 * -(-elements // 4096)
  sent = {"all_gather": 3 * words, "two_shot": 1.5 * words, "ring": 1.5 * words}
  if exchange in sent:  # rows fill shares, and zeros fill lines
    most = 1.01 * (4 * sent[exchange] + 4 * 6 * 520 * 4)
    assert 4 * sent[exchange] <= found.bytes_sent <= most


@pytest.mark.bits
def test_lanes_change_no_bits(monkeypatch):
  """Of means and of what is kept; all lines are short here, or all of them long.

  A sum of gradcomp.parallel takes an exchange of parts, and a gather.
  """
  options = dict(axis_name="data", exchange="two_shot", feedback="error", key=3)
  nearest = QSGD(bits=4, bucket_size=32, rounding="nearest")
  steps = [laws.tree({"b": (9,), "w": (64, 41)}, 4, seed=i) for i in range(2)]

  def run():
    tx = gradcomp.compress(QSGD(bits=3, bucket_size=32), **options)
    psum = lambda x: gradcomp.parallel.psum(x, axis_name="data", codec=nearest)
    total = jax.jit(jax.vmap(psum, axis_name="data"))(steps[0]["w"])
    return modes.run_all("vmap", tx, steps), total

  flat = run()
  monkeypatch.setattr(collectives, "_LEAST", 1)
  assert_same_bits(run(), flat)
