"""Every row of the table obeys every law; a law that no row has is an error."""

import functools
import itertools

import jax
import pytest

from gradcomp._src.transforms.low_rank import PowerSGD
from gradcomp._src.version import WIRE
from gradcomp.testing import laws as kit
from tests.support import laws as support
from tests.support import pages
from tests.table import cover, laws, run

HASHED, LINES = run.read()
# Of each kind of sum that has an order, and of each exchange; and a place for each.
KINDS = {
  ("qsgd-4-64", "two_shot", "error", 4): "shard_map",
  ("qsgd-4-64-share_scale", "psum", "error", 4): "explicit",
  ("qsgd-8-None-nearest", "two_shot", "error", 3): "checked",
  ("qsgd-4-64-nonuniform", "hierarchical", "error", 8): "two_axes",
  ("floatcast-stochastic", "ring", "error", 4): "pmap",
  ("onebit-64-per_column", "hierarchical", "error", 4): "auto",
  ("topk-0.02-threshold-asq-1000", "two_shot", "momentum", 4): "beside",
}


_ROWS = itertools.count(1)


@pytest.mark.parametrize(
  "row",
  [
    pytest.param(x.row, id=x.row.name, marks=pytest.mark.slow if x.slow else ())
    for x in LINES
  ],
)
def test_laws(row):
  obeys(run.run(row))


@pytest.fixture(autouse=True)
def few_programs():
  """Lets go of the programs of many rows, which take gigabytes; few are of two rows."""
  yield
  if next(_ROWS) % 48 == 0:
    jax.clear_caches()


def obeys(found):
  broken = []
  for law in laws.LAWS:
    try:
      law(found)
    except AssertionError as error:
      broken.append(f"{law.__name__}: {error}")
  assert not broken, "\n".join(broken)


def placed(kind, *places, marks=()):
  told = places if len(places) == 2 else ["everywhere"]
  name = " ".join(map(str, (*kind, *told)))
  return pytest.param(kind, places, id=name, marks=marks)


@pytest.mark.parametrize(
  "kind, places",
  [
    *(placed(kind, "vmap", place) for kind, place in KINDS.items()),
    *(placed(x, *run.PLACES, marks=pytest.mark.bits) for x in list(KINDS)[:4]),
    *(placed(x, *run.PLACES, marks=pytest.mark.slow) for x in list(KINDS)[4:]),
  ],
)
def test_places_have_the_same_bits(kind, places):
  """And obey the laws: those of specifications, too, where XLA optimizes."""
  rows = [run.Row(*kind[:3], place, kind[3]) for place in places]
  runs = [run.run(row) for row in rows if row.workers in run.PLACES[row.place][1]]
  obeys(runs[-1])
  kit.same_bits_in_every_mode(*runs)


def test_the_wire_has_the_number_of_the_hashes():
  """And of the page that specifies it; each row has one, but for PowerSGD's."""
  assert HASHED == WIRE
  assert {type(x.row.codec) for x in LINES if x.hash == "-"} == {PowerSGD}
  page = pages.ROOT / "docs" / "inside" / "wire-format.md"
  assert f"This is wire {WIRE}," in page.read_text()


def test_leaves_are_longer_than_their_zeros():
  """Else nothing is lost where nothing was given."""
  for case in support.SETTINGS.values():
    assert run.sizes(case.codec)[0] > 2 * run.ZEROS


def test_each_law_speaks_of_some_row():
  """A law that returned False everywhere would hold of nothing."""
  rows = (
    run.Row("qsgd-4-64", "all_gather", "error", "shard_map", 2),
    run.Row("qsgd-4-64", "two_shot", "error", "shard_map", 3),
    run.Row("blockfloat", "all_gather", "error", "vmap", 8),  # which has a hash
  )
  found = [run.run(row) for row in rows]
  for law in laws.LAWS:
    assert any(laws.speaks(law, each) for each in found), law.__name__


@functools.cache
def allowed():
  return cover.rows()


@pytest.mark.parametrize("facts", [cover.plain, cover.every], ids=["plain", "all"])
def test_every_pair_has_a_row(facts):
  """Else ``python -m tests.table.cover`` adds rows."""
  rows = [x.row for x in LINES if not x.slow or facts is cover.every]
  assert set(rows) <= set(allowed())
  assert not cover.completed(rows, allowed(), facts)
