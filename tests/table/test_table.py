"""Every row of the table obeys every law; a law that no row has is an error."""

import functools

import pytest

from tests.table import cover, laws, run

ROWS = run.read()


@pytest.mark.parametrize(
  "row",
  [
    pytest.param(row, id=row.name, marks=pytest.mark.slow if slow else ())
    for row, slow in ROWS
  ],
)
def test_laws(row):
  found = run.run(row)
  broken = []
  for law in laws.LAWS:
    try:
      law(found)
    except AssertionError as error:
      broken.append(f"{law.__name__}: {error}")
  assert not broken, "\n".join(broken)


def test_each_law_speaks_of_some_row():
  """A law that returned False everywhere would hold of nothing."""
  rows = (
    run.Row("qsgd-4-64", "all_gather", "error", "shard_map", 2),
    run.Row("qsgd-4-64", "two_shot", "error", "shard_map", 3),
  )
  found = [run.run(row) for row in rows]
  for law in laws.LAWS:
    assert not all(law(each) is False for each in found), law.__name__


@functools.cache
def allowed():
  return cover.rows()


@pytest.mark.parametrize("facts", [cover.plain, cover.every], ids=["plain", "all"])
def test_every_pair_has_a_row(facts):
  """Else ``python -m tests.table.cover`` adds rows."""
  rows = [row for row, slow in ROWS if not slow or facts is cover.every]
  assert set(rows) <= set(allowed())
  assert not cover.completed(rows, allowed(), facts)
