"""Makes records of a study, and those that decide each of its findings."""

from benchmarks.study.records import Record
from benchmarks.study.settings import Setting

SETTING = Setting(
  way="emulated",
  network="lenet",
  dataset="digits",
  codec="f32",
  exchange="auto",
  workers=8,
  rule="fixed",
  batch=64,
  steps=40,
  epoch=1280,
  points=4,
  seed=0,
  optimizer="sgd",
  learning_rate=0.05,
  momentum=0.9,
  max_norm=None,
)
TIMED = SETTING._replace(way="timed", points=0, link="1gbit", workers=2, hosts=2)


def curve(*accuracies, loss=1.0, learned=1.0):
  return [
    {"step": 10 * (i + 1), "accuracy": x, "test_loss": loss, "train_loss": learned}
    for i, x in enumerate(accuracies)
  ]


def pair(codec, good, bad, beside=()):
  """Records of a codec that bear a claim out, and such that do not."""
  return tuple([*beside, *trained(codec, *ends)] for ends in (good, bad))


def trained(codec, *ends, early=None, times=3, loss=1.0, learned=1.0, **changed):
  """Records of a codec, some for each accuracy at the end."""
  records = []
  for seed, end in enumerate(times * ends):
    first = end if early is None else early
    points = curve(first, end, loss=loss, learned=learned)
    setting = SETTING._replace(codec=codec, seed=seed, **changed)
    records.append(Record(setting, {"points": points, "ratio": 1.0}))
  return records


def beside_f32(codec, good, bad, **changed):
  """The same as ``pair``, of another setting."""
  full = trained("f32", 90.0, 91.0, **changed)
  return tuple(full + trained(codec, *ends, **changed) for ends in (good, bad))


def timed(codec, step, communication=0.0, megabytes=1.0, sent=None, **changed):
  """A record of a step's seconds, whose codec takes none and has bytes of its own."""
  results = {
    "step": step,
    "compute": step - communication,
    "codec": 0.0,
    "communication": communication,
    "megabytes": megabytes,
    "gigaflops": 1.0,
    "bytes_a_step": len(codec) if sent is None else sent,
    "price": 3600.0,
    "cpu": "a processor",
    "cores": 2,
  }
  return [Record(TIMED._replace(codec=codec, **changed), results)]


def line(**seconds):
  """Times of float32 and QSGD on one link, by the bits."""
  names = {32: "f32", 16: "qsgd-16", 8: "qsgd-8", 4: "qsgd-4", 2: "qsgd-2"}
  return [
    record
    for bits, x in seconds.items()
    for record in timed(names[int(bits[1:])], 1 + x, x)
  ]


FULL = trained("f32", 90.0, 91.0)
SLOW = {"link": "1gbit"}
FAST = {"link": "loopback"}
MANY = {"workers": 256}
ADAM = {"optimizer": "adam", "rule": "per-worker"}
WORSE, SAME, BETTER = (88.0, 89.1), (90.0, 91.0), (91.0, 92.1)


def than(codec, other, good, bad, **changed):
  """Records of two codecs: what bears out that one is as a claim says, and what not."""
  beside = trained(other, *SAME, **changed)
  return tuple([*beside, *trained(codec, *ends, **changed)] for ends in (good, bad))


# For each claim, what bears it out, and what does not.
CASES = {
  "QSGD with 8 bits in": pair("qsgd-8", (89.9, 91), (89.0, 90.1)),
  "QSGD with 8 bits learns": tuple(
    trained("f32", *SAME, early=80.0) + trained("qsgd-8", *SAME, early=early)
    for early in (79.9, 79.7)
  ),
  "QSGD with 4 bits in buckets of 512": pair("qsgd-4", (90, 91), (89.6, 90.5)),
  "QSGD with 4 or 8 bits ends": pair("qsgd-8", (90.3, 91.2), (90.0, 91.1)),
  "QSGD with 4 or 8 bits has": tuple(
    trained("qsgd-4", *SAME, learned=learned) for learned in (0.9, 1.1)
  ),
  "QSGD with 16 bits": pair("qsgd-16", (89.9, 91), (89.0, 90.1)),
  "Fitted levels": than("qsgd-2-fitted", "qsgd-2", (90.0, 91.1), BETTER),
  "1-bit SGD in buckets of 64 ends": pair("onebit-64", (89.8, 90.8), (89.6, 90.6)),
  "1-bit SGD converges later": (
    trained("f32", *SAME, early=80.0) + trained("onebit-64", 89.9, 90.9, early=75.0),
    trained("f32", *SAME, early=80.0) + trained("onebit-64", 89.0, 90.0, early=80.0),
  ),
  "1-bit SGD is worse in buckets": than("onebit-512", "onebit-64", WORSE, SAME),
  "1-bit SGD in buckets is worse": than("onebit-64", "onebit-64:dense", WORSE, SAME),
  "1 bit does": pair("onebit-64:dense", SAME, WORSE),
  "QSGD with 2 bits in buckets": pair("qsgd-2-paper", (88.9, 89.9), (89.1, 90.1)),
  "QSGD with 2 bits is worse": than("qsgd-2-tensor-paper", "qsgd-2-paper", WORSE, SAME),
  "QSGD with 4 bits in buckets of 8192": pair("qsgd-4-8192-paper", WORSE, SAME),
  "QSGD with 1 bit": pair("qsgd-1-uniform-paper", WORSE, SAME),
  "QSGD with 4 bits and the": pair("qsgd-4-l2-paper", WORSE, SAME),
  "QSGD with 2 bits and the": pair("qsgd-2-l2-paper", (10.0, 10.0), SAME),
  "Convolutions": than("qsgd-2-paper:conv", "qsgd-2-paper:dense", WORSE, SAME),
  "A recurrent net": beside_f32("qsgd-2", (89.9, 90.9), WORSE, network="lstm"),
  "TernGrad ends at most 0.22": tuple(
    [
      record
      for workers in (2, 64)
      for codec, found in (("f32", SAME), ("terngrad", ends))
      for record in trained(codec, *found, workers=workers, schedule="polynomial")
    ]
    for ends in ((89.9, 90.9), (89.7, 90.7))
  ),
  "TernGrad with Adam and": beside_f32("terngrad", (89.2, 90.2), (88.8, 89.8), **ADAM),
  "TernGrad with Adam loses": tuple(
    trained("f32", *SAME, **ADAM)
    + trained("terngrad", 89.0, 90.0, **ADAM)
    + trained("f32", *SAME, **ADAM, workers=16, batch=128)
    + trained("terngrad", *ends, **ADAM, workers=16, batch=128)
    for ends in ((89.5, 90.6), (89.0, 90.1))
  ),
  "TernGrad ends less than 2": pair("terngrad", (88.1, 89.1), (87.9, 88.9)),
  "TernGrad is worse without": than("terngrad-noclip", "terngrad", (87, 88.1), SAME),
  "TernGrad loses less": tuple(
    trained("f32", *SAME, dropout=0.0)
    + trained("terngrad", *ends, dropout=0.0)
    + trained("terngrad", 89.0, 90.0)
    for ends in ((89.5, 90.51), (88.5, 89.5))
  ),
  "TernGrad is worse if": than("terngrad", "terngrad:body", WORSE, SAME),
  "TernGrad has": tuple(
    trained("terngrad", *SAME, learned=learned) for learned in (0.9, 1.1)
  ),
  "TernGrad ends above": than("terngrad", "qsgd-2-paper", BETTER, SAME),
  "Without a start": than("terngrad", "onebit-64", BETTER, SAME),
  "Dettmers' four types of 8 bits end": tuple(
    [
      record
      for i, name in enumerate(("dynamic-tree", "linear", "mantissa", "static-tree"))
      for record in trained(
        name, 90 + 0.05 * (-1) ** i, 91 - 0.05 * (-1) ** i - i * step
      )
    ]
    for step in (0.0, 5.0)
  ),
  "APS with 8 bits ends less than 0.05": tuple(
    trained("aps-5-2", *ends) + trained("aps-4-3", *SAME)
    for ends in (SAME, (89.6, 90.6))
  ),
  "4 bits (3, 0)": pair("aps-3-0", (80.0, 81.1), SAME),
  "Casts to (3, 0)": pair("cast-3-0", (10.0, 10.0), SAME),
  "Casts to (4, 3)": than("cast-4-3", "aps-4-3", WORSE, SAME),
  "Casts to (5, 2)": than("cast-5-2", "aps-5-2", WORSE, SAME),
  "APS with 8 bits, the last": beside_f32("aps-5-2-h16:body", SAME, WORSE, **MANY),
  "APS with 8 bits behind": beside_f32("aps-4-3-h16-hybrid:body", SAME, WORSE, **MANY),
  "With 256 workers casts to (4, 3)": beside_f32(
    "cast-4-3-h16:body", WORSE, SAME, **MANY
  ),
  **{
    f"With 256 workers {start}": than(codec, f"{other}-h16:body", WORSE, SAME, **MANY)
    for start, codec, other in (
      ("casts to (5, 2)", "cast-5-2-h16:body", "aps-5-2"),
      ("(5, 2) is worse if", "aps-5-2-h16", "aps-5-2"),
      ("(4, 3) is worse if", "aps-4-3-h16", "aps-4-3"),
      ("(5, 2) is worse in", "aps-5-2:body", "aps-5-2"),
    )
  },
  "Groups of 32": than("aps-5-2-h32", "aps-5-2-h16", WORSE, SAME, **MANY),
  "RedSync with 1 % ends": pair("redsync-1", (89.1, 90.1), (88.9, 89.9)),
  "RedSync with 1 % and 512": beside_f32(
    "redsync-1", (89.0, 90.0), (88.8, 89.8), batch=512
  ),
  "RedSync with 0.1 % ends": beside_f32(
    "redsync-0.1", (89.1, 90.1), (88.9, 89.9), steps=20_000
  ),
  "RedSync has": tuple(
    trained("f32", 50.0, 51.0, network="lstm")
    + trained("redsync-1", 50.0, 51.0, network="lstm", loss=loss)
    for loss in (1.009, 1.011)
  ),
  "RedSync with alternating": tuple(
    trained("f32", 50.0, 51.0, network="lstm")
    + trained("redsync-0.1-asq-paper", 50.0, 51.0, network="lstm", loss=loss)
    for loss in (1.009, 1.011)
  ),
  "1-bit SGD without": pair("onebit-64-nofeedback", WORSE, SAME),
  "The largest 1 %": pair("topk-1-noresidual", WORSE, SAME),
  "Communication falls": (line(b32=1, b8=0.3, b4=0.2), line(b32=1, b8=0.3, b4=0.4)),
  "1-bit SGD in buckets of 64 is rarely": (
    timed("onebit-64", 2.0) + timed("qsgd-4", 1.0),
    timed("onebit-64", 1.0) + timed("qsgd-4", 2.0),
  ),
  "The time of a sample": (
    line(b32=1, b8=0.252, b4=0.127, b2=0.07),
    line(b32=1, b8=1.2, b4=0.1, b2=0.07),
  ),
  "2 bits rarely": (line(b4=0.4, b2=0.3), line(b4=0.9, b2=0.1)),
  "In many cases": (
    timed("onebit-64", 2.0) + timed("qsgd-2", 1.0),
    timed("onebit-64", 1.0) + timed("qsgd-2", 2.0),
  ),
  "On a net with convolutions": (
    timed("onebit-column", 2.0) + timed("onebit-64", 1.0),
    timed("onebit-column", 1.0) + timed("onebit-64", 2.0),
  ),
  "1-bit SGD by columns is slower than float32": tuple(
    timed("onebit-column", step, network="resnet") + timed("f32", 2, network="resnet")
    for step in (3.0, 1.0)
  ),
  "Float32 on a fast": tuple(
    timed("f32", 9, **SLOW) + timed("qsgd-4", 3, **SLOW) + timed("f32", step, **FAST)
    for step in (2.0, 4.0)
  ),
  **{
    f"On a fast link few bits gain {start}": tuple(
      timed("f32", 9, **SLOW)
      + timed("qsgd-4", 3, **SLOW)
      + timed("f32", 2, **FAST)
      + timed("qsgd-4", step, **FAST)
      for step in steps
    )
    for start, steps in (("less", (1.65, 0.5)), ("1.4", (1.65, 1.3)))
  },
  "The net that communicates": tuple(
    timed("f32", 4, 3.0)
    + timed("qsgd-4", first)
    + timed("f32", 4, 1.0, network="resnet")
    + timed("qsgd-4", 3.5, network="resnet")
    for first in (1.0, 3.8)
  ),
  "Twice the workers": tuple(
    timed("f32", 4.0, 1.0) + timed("f32", step, communication, workers=4, hosts=4)
    for step, communication in ((3.0, 1.5), (1.8, 0.4))
  ),
  "The gain rises": tuple(
    timed("f32", 4.0, megabytes=9.0)
    + timed("qsgd-8", first, megabytes=9.0)
    + timed("f32", 4.0, network="resnet")
    + timed("qsgd-8", 3.5, network="resnet")
    for first in (1.5, 0.5)
  ),
}
