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


def curve(*accuracies, loss=1.0):
  return [
    {"step": 10 * (i + 1), "accuracy": x, "test_loss": loss, "train_loss": 1.0}
    for i, x in enumerate(accuracies)
  ]


def pair(codec, good, bad, beside=()):
  """Records of a codec that bear a claim out, and such that do not."""
  return tuple([*beside, *trained(codec, *ends)] for ends in (good, bad))


def trained(codec, *ends, early=None, times=3, loss=1.0, **changed):
  """Records of a codec, some for each accuracy at the end."""
  return [
    Record(
      SETTING._replace(codec=codec, seed=seed, **changed),
      {"points": curve(end if early is None else early, end, loss=loss), "ratio": 1.0},
    )
    for seed, end in enumerate(times * ends)
  ]


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
# For each claim, what bears it out, and what does not.
CASES = {
  "QSGD with 16 bits": pair("qsgd-16", (89.9, 91), (89.0, 90.9)),
  "Fitted levels": pair(
    "qsgd-2-fitted", (90.0, 91.1), (91.0, 92.1), trained("qsgd-2", 90, 91)
  ),
  "QSGD with 8 bits": pair("qsgd-8", (89.9, 91), (89.0, 90.9)),
  "QSGD with 4 bits in buckets of 512": pair("qsgd-4", (90, 90.7), (89.6, 90.5)),
  "1-bit SGD in buckets of 64 ends": pair("onebit-64", (89.8, 90.8), (89.6, 90.6)),
  "1-bit SGD converges later": (
    trained("f32", 90, 91, early=80.0) + trained("onebit-64", 89.9, 90.9, early=75.0),
    trained("f32", 90, 91, early=80.0) + trained("onebit-64", 89.0, 90.0, early=80.0),
  ),
  "1-bit SGD is worse in buckets": pair(
    "onebit-512", (89.0, 90.1), (89.0, 91.1), trained("onebit-64", 90, 91)
  ),
  "1-bit SGD loses": (
    trained("onebit-64", 89.0, 90.0) + trained("onebit-64:dense", 90.0, 90.9),
    trained("onebit-64", 90.0, 91.0) + trained("onebit-64:dense", 90.0, 90.9),
  ),
  "QSGD with 2 bits in buckets": pair("qsgd-2-paper", (89.0, 90.01), (89.0, 91.0)),
  "QSGD with 2 bits is worse": pair(
    "qsgd-2-tensor-paper", (89.0, 90.01), (90.0, 91.0), trained("qsgd-2-paper", 90, 91)
  ),
  "QSGD with 4 bits is worse": pair(
    "qsgd-4-8192-paper", (89.0, 90.01), (90.0, 91.0), trained("qsgd-4-paper", 90, 91)
  ),
  "QSGD with 1 bit": pair("qsgd-1-uniform-paper", (80.0, 82.0), (89.5, 90.5)),
  "QSGD with 4 bits and the": pair("qsgd-4-l2-paper", (80.0, 82.0), (90.0, 91.0)),
  "QSGD with 2 bits and the": pair("qsgd-2-l2-paper", (10.0, 10.0), (90.0, 91.0)),
  "Convolutions": tuple(
    trained("qsgd-2-paper:conv", *ends) + trained("qsgd-2-paper:dense", 90.0, 91.01)
    for ends in ((89.0, 90.0), (90.0, 91.02))
  ),
  "A recurrent net": tuple(
    trained("f32", 50.0, 51.0, network="lstm")
    + trained("qsgd-2", *ends, network="lstm")
    for ends in ((49.9, 50.9), (49.0, 50.9))
  ),
  "1-bit SGD without": pair("onebit-64-nofeedback", (80.0, 82.0), (90.0, 91.0)),
  "TernGrad ends at most 0.22": tuple(
    [
      record
      for workers in (2, 64)
      for record in trained("f32", 90.0, 91.0, workers=workers, schedule="polynomial")
      + trained("terngrad", *ends, workers=workers, schedule="polynomial")
    ]
    for ends in ((89.9, 90.9), (89.7, 90.7))
  ),
  "TernGrad with Adam": tuple(
    trained("f32", 90.0, 91.0, optimizer="adam", rule="per-worker")
    + trained("terngrad", *ends, optimizer="adam", rule="per-worker")
    for ends in ((89.2, 90.2), (88.8, 89.9))
  ),
  "TernGrad ends at most 2": pair("terngrad", (88.1, 89.1), (87.9, 88.9)),
  "TernGrad is worse without": pair(
    "terngrad-noclip", (87.0, 88.1), (90.0, 91.0), trained("terngrad", 90, 91)
  ),
  "TernGrad loses less": tuple(
    trained("f32", 90.0, 91.0, dropout=0.0)
    + trained("terngrad", *ends, dropout=0.0)
    + trained("terngrad", 89.0, 90.0)
    for ends in ((89.5, 90.51), (88.5, 89.5))
  ),
  "TernGrad is worse if": pair(
    "terngrad", (87.0, 88.1), (90.0, 91.0), trained("terngrad:body", 90, 91)
  ),
  "Dettmers' four types of 8 bits end": tuple(
    [
      record
      for i, name in enumerate(("dynamic-tree", "linear", "mantissa", "static-tree"))
      for record in trained(name, 90.1 - i * step, 90.9 - i * step)
    ]
    for step in (0.0, 5.0)
  ),
  "APS with 8 bits ends within 0.2 points of float32.": (
    trained("aps-5-2", 89.9, 90.9) + trained("aps-4-3", 90.0, 91.0),
    trained("aps-5-2", 89.6, 90.6) + trained("aps-4-3", 90.0, 91.0),
  ),
  "4 bits (3, 0)": pair("aps-3-0", (80.0, 81.1), (90.0, 91.0)),
  "Casts to (3, 0)": pair("cast-3-0", (10.0, 10.0), (90.0, 91.0)),
  "Casts to (4, 3)": pair(
    "cast-4-3", (89.0, 90.01), (90.0, 91.0), trained("aps-4-3", 90.0, 91.0)
  ),
  "APS with 8 bits behind": tuple(
    trained("f32", 90.0, 91.0, workers=256)
    + trained("aps-4-3-h16-hybrid:body", *ends, workers=256)
    for ends in ((89.9, 90.9), (89.6, 90.6))
  ),
  "APS with 8 bits, the last": tuple(
    trained("f32", 90.0, 91.0, workers=256)
    + trained("aps-5-2-h16:body", *ends, workers=256)
    for ends in ((89.9, 90.9), (89.6, 90.6))
  ),
  **{
    start: tuple(
      trained(codec, *ends, workers=256)
      + trained("aps-5-2-h16:body", 90.0, 91.0, workers=256)
      for ends in ((89.0, 90.01), (90.0, 91.0))
    )
    for start, codec in (
      ("With 256 workers (5, 2) is worse if", "aps-5-2-h16"),
      ("With 256 workers (5, 2) is worse in", "aps-5-2:body"),
    )
  },
  "Groups of 32": tuple(
    trained("aps-5-2-h16", 90.0, 91.0, workers=256)
    + trained("aps-5-2-h32", *ends, workers=256)
    for ends in ((89.0, 90.01), (90.0, 91.0))
  ),
  "RedSync with 1 % ends": pair("redsync-1", (89.1, 90.1), (88.9, 89.9)),
  "RedSync with 1 % and 512": tuple(
    trained("f32", 90.0, 91.0, batch=512) + trained("redsync-1", *ends, batch=512)
    for ends in ((89.0, 90.0), (88.8, 89.8))
  ),
  "RedSync with 0.1 % ends": tuple(
    trained("f32", 90.0, 91.0, steps=20_000)
    + trained("redsync-0.1", *ends, steps=20_000)
    for ends in ((89.1, 90.1), (88.9, 89.9))
  ),
  "RedSync on a recurrent": tuple(
    trained("f32", 50.0, 51.0, network="lstm")
    + trained("redsync-1", 50.0, 51.0, network="lstm", loss=loss)
    for loss in (1.009, 1.011)
  ),
  "The largest 1 %": pair("topk-1-noresidual", (80.0, 81.0), (90.0, 91.0)),
  "Communication falls": (line(b32=1, b8=0.3, b4=0.2), line(b32=1, b8=0.3, b4=0.4)),
  "The time of a sample": (
    line(b32=1, b8=0.252, b4=0.127, b2=0.07),
    line(b32=1, b8=1.2, b4=0.1, b2=0.07),
  ),
  "2 bits rarely": (line(b4=0.5, b2=0.3), line(b4=0.9, b2=0.1)),
  "In many cases": (
    timed("onebit-64", 2.0) + timed("qsgd-2", 1.0),
    timed("onebit-64", 1.0) + timed("qsgd-2", 2.0),
  ),
  "1-bit SGD by columns is slower than in": (
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
  "On a fast link": tuple(
    timed("f32", 9, **SLOW)
    + timed("qsgd-4", 3, **SLOW)
    + timed("f32", 2, **FAST)
    + timed("qsgd-4", step, **FAST)
    for step in (1.65, 1.5)
  ),
  "The net that communicates": tuple(
    timed("f32", 4, 3.0)
    + timed("qsgd-4", first)
    + timed("f32", 4, 1.0, network="resnet")
    + timed("qsgd-4", 3.5, network="resnet")
    for first in (1.0, 3.8)
  ),
  "Twice the workers": tuple(
    timed("f32", 4.0, 1.0) + timed("f32", step, communication, workers=4, hosts=4)
    for step, communication in ((3.0, 1.5), (1.9, 0.4))
  ),
  "The gain rises": tuple(
    timed("f32", 4.0, megabytes=9.0)
    + timed("qsgd-8", first, megabytes=9.0)
    + timed("f32", 4.0, network="resnet")
    + timed("qsgd-8", 3.5, network="resnet")
    for first in (1.5, 0.5)
  ),
}
