"""The page on overlap agrees with the record of the compilers' programs."""

import pytest

from benchmarks.compilers import overlap_page, record

ROWS = record.read(record.FOLDER / "overlap.jsonl")
ONE, EACH = "one message", "a message a layer"
FLAG = "xla_tpu_enable_async_all_to_all"
INSIDE = "inside of a loop of layers"
TPU_FLAG = f"{EACH}, {FLAG}"
GPUS = ("H100", "H200", "B200")
SLICES = "2 slices of v5e"


def stage(row, kind):
  return [x for x in row["overlaps"] if x["kind"] == kind]


def test_one_message_overlaps_no_product():
  rows = [row for (_, case), row in ROWS.items() if case == ONE]
  assert len(rows) >= 5
  assert not [x for row in rows for x in row["overlaps"] if x["products"]]


def test_between_slices_all_messages_but_the_last_are_sent_among_products():
  """Without a flag; also where sums of the chips of a slice go."""
  for case in (EACH, f"{EACH}, hierarchical"):
    sent = [x for x in stage(ROWS[SLICES, case], "all-to-all") if not x["synchronous"]]
    assert [x["products"] > 0 for x in sent] == [True, True, True, False]


@pytest.mark.parametrize("target", GPUS)
def test_on_gpus_nothing_is_exposed_and_no_flag_is_needed(target):
  """XLA cannot combine the gathers, since each needs the one before it."""
  row = ROWS[target, EACH]
  sent, gathered = (stage(row, kind) for kind in ("all-to-all", "all-gather"))
  assert len(sent) == len(gathered) == 4
  # For a B200, whose products take half the time, XLA puts them beside the gathers.
  every = sent + gathered if target == "B200" else sent
  assert sum(x["products"] > 0 for x in every) >= 3
  assert not any(x["exposed"] for x in (*sent, *gathered))
  assert row["hints"] == []


@pytest.mark.parametrize("target", ["v5e", "v6e", "v5p"])
def test_in_a_slice_all_to_alls_need_the_flag(target):
  before, after = (stage(ROWS[target, x], "all-to-all") for x in (EACH, TPU_FLAG))
  assert all(x["synchronous"] for x in before)
  assert not any(x["synchronous"] for x in after)
  assert after[0]["products"] > 0
  assert ROWS[target, TPU_FLAG]["exposed_share"] < ROWS[target, EACH]["exposed_share"]
  assert TPU_FLAG.split()[-1] in ROWS[target, EACH]["hints"][0]


@pytest.mark.parametrize(
  "target, beside", [("v5e", 3), ("v6e", 3), ("v5p", 3), ("tpu7x", 2)]
)
def test_in_turn_messages_in_a_slice_span_products(target, beside):
  """All but the last, or two."""
  sent = stage(ROWS[target, f"{EACH}, in turn, {FLAG}"], "all-to-all")
  assert [x["products"] > 0 for x in sent] == [i < beside for i in range(4)]


SPARSE = "xla_tpu_enable_sparse_core_collective_offload_"
GATHER, SEND = SPARSE + "all_gather", SPARSE + "dense_all_to_all"
LOOPS = [
  ("v5e", (FLAG,), {6}),
  ("v6e", (GATHER, SEND), {6}),
  ("tpu7x", (FLAG,), {6}),
  ("tpu7x", (GATHER, SEND), {6}),
  (SLICES, ("hierarchical", FLAG), {4}),
  *[(gpu, (), {6}) for gpu in GPUS],
]


@pytest.mark.parametrize("target, given, trips", LOOPS)
def test_no_collective_in_a_loop_of_layers_is_exposed(target, given, trips):
  """Each stage of an exchange has work beside it, and some have products."""
  row = ROWS[target, ", ".join((INSIDE, *given))]
  loop = [x for x in row["overlaps"] if x["times"] > 1]
  assert {x["kind"] for x in loop} == {"all-to-all", "all-gather"}
  assert {x["times"] for x in loop} == trips
  assert not [x for x in loop if x["synchronous"] or x["exposed"]]
  assert any(x["products"] for x in loop)


@pytest.mark.parametrize("target", ["v5e", "H100", SLICES])
def test_behind_a_loop_of_layers_all_is_exposed(target):
  assert ROWS[target, "behind a loop of layers"]["exposed_share"] == 1


def test_between_slices_messages_in_a_loop_are_sent_beside_products():
  """Without a flag; only gathers inside of a slice come behind those between them."""
  row = ROWS[SLICES, INSIDE]
  loop = [x for x in row["overlaps"] if x["times"] == 6]
  sent = [x for x in loop if not x["synchronous"]]
  assert {x["kind"] for x in sent} == {"all-to-all", "all-gather"}
  assert all(x["products"] > 0 for x in sent)
  assert [x["kind"] for x in loop if x["synchronous"]] == ["all-gather"]


def test_a_cell_counts_what_is_alike():
  """In a row; and says how often each runs."""
  one = {"kind": "all-to-all", "times": 1, "synchronous": False, "exposed": False}
  two, work = one | {"products": 2}, one | {"products": 0}
  bare, loop = work | {"exposed": True}, work | {"times": 6, "exposed": True}
  late = work | {"kind": "all-gather", "synchronous": True, "exposed": True}
  row = {"overlaps": [two, two, work, bare, loop, late], "exposed_share": 0.254}
  assert overlap_page.cells(row) == [
    "all-to-all: 2 over 2 products, 1 over work, 1 bare, 1 bare (6 times each); "
    "all-gather: 1 synchronous",
    "25 %",
  ]


def test_an_overlap_that_is_lost_is_said():
  """When a case is compiled anew."""
  row = ROWS["H100", EACH]
  (said,) = record.dearer(row | {"exposed_share": 1.0}, row | {"exposed_share": 0.5})
  assert said.startswith("exposed bytes rose from 7,454,720 to 14,909,440")
