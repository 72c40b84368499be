"""Makes records of a study, and those that decide findings, by their judges."""

from benchmarks.study.records import Record
from benchmarks.study.settings import Setting

SETTING = Setting(
  **dict(way="emulated", network="lenet", dataset="digits", codec="f32"),
  **dict(exchange="auto", workers=8, rule="fixed", batch=64, steps=40, epoch=1280),
  **dict(points=4, seed=0, optimizer="sgd", learning_rate=0.05, momentum=0.9),
  max_norm=None,
)
TIMED = SETTING._replace(way="timed", points=0, link="1gbit", workers=2, hosts=2)


def curve(*accuracies, loss=1.0):
  return [
    {"step": 10 * (i + 1), "accuracy": x, "test_loss": loss, "train_loss": 1.0}
    for i, x in enumerate(accuracies)
  ]


def trained(codec, *ends, early=None, times=3, loss=1.0, **changed):
  """Records of a codec, some for each accuracy at the end."""
  records = []
  for seed, end in enumerate(times * ends):
    points = curve(end if early is None else early, end, loss=loss)
    setting = SETTING._replace(codec=codec, seed=seed, **changed)
    records.append(Record(setting, {"points": points, "ratio": 1.0}))
  return records


def timed(codec, step, communication=0.0, megabytes=1.0, **changed):
  """A record of a step's seconds, whose codec takes none and has bytes of its own."""
  results = {"step": step, "compute": step - communication, "codec": 0.0}
  results |= {"communication": communication, "megabytes": megabytes, "gigaflops": 1.0}
  results |= {"bytes_a_step": len(codec), "cpu": "a processor", "cores": 2}
  return [Record(TIMED._replace(codec=codec, **changed), results)]


def line(**seconds):
  """Times of float32 and QSGD on one link, by the bits."""
  name = lambda bits: "f32" if bits == "b32" else f"qsgd-{bits[1:]}"
  return [r for bits, x in seconds.items() for r in timed(name(bits), 1 + x, x)]


def link(rate, hosts=2, **steps):
  place = dict(link=rate, workers=hosts, hosts=hosts)
  return [r for x, s in steps.items() for r in timed(x.replace("_", "-"), s, **place)]


FULL = trained("f32", 90.0, 91.0)
EARLY = trained("f32", 90.0, 91.0, early=80.0)
SLOW = link("1gbit", f32=9, qsgd_4=3)
ADAM = {"optimizer": "adam", "rule": "per-worker"}
MORE = ADAM | {"workers": 16, "batch": 128}
SAME = (90.0, 91.0)
WEN = {"schedule": "polynomial", "dataset": "mnist/14"}


def failing(records):
  """Records of an arm that fails wherever float32 was trained."""
  points = curve(1.0, 1.0)
  return [
    Record(x.setting._replace(codec="topk-0.1-noresidual"), {"points": points})
    for x in records
    if (x.setting.codec, x.setting.way) == ("f32", "emulated")
  ]


def than(codec, other, good, bad, **changed):
  """Records of two codecs: what bears out that one is as a claim says, and what not."""
  beside = trained(other, *SAME, **changed)
  return [beside + trained(codec, *ends, **changed) for ends in (good, bad)]


def both(codec, *ends, like=SAME, **options):
  return trained("f32", *like, **options) + trained(codec, *ends, **options)


# For claims of each judge, what bears them out, and what does not.
CASES = {
  "QSGD with 8 bits in": than("qsgd-8", "f32", (89.9, 91), (89.0, 90.1)),
  "QSGD with 8 bits learns": [
    EARLY + trained("qsgd-8", *SAME, early=early) for early in (79.9, 79.7)
  ],
  "TernGrad ends above QSGD": than(
    *("terngrad", "qsgd-2-paper", (91.0, 92.1), (90.0, 91.1))
  ),
  "1-bit SGD converges later": [
    EARLY + trained("onebit-64", 89.9, 90.9, early=75.0),
    EARLY + trained("onebit-64", 89.0, 90.0, early=80.0),
  ],
  "TernGrad ends at most 0.22": [
    both("terngrad", *ends, workers=2, **WEN)
    + both("terngrad", *ends, workers=64, **WEN)
    for ends in ((89.9, 90.9), (89.7, 90.7))
  ],
  "TernGrad with Adam loses": [
    both("terngrad", 89.0, 90.0, **ADAM) + both("terngrad", *ends, **MORE)
    for ends in ((89.5, 90.6), (89.0, 90.1))
  ],
  "TernGrad ends less than 2": than("terngrad", "f32", (88.1, 89.1), (87.9, 88.9)),
  "TernGrad loses less": [
    both("terngrad", *ends, dropout=0.0) + trained("terngrad", 89.0, 90.0)
    for ends in ((89.5, 90.51), (88.5, 89.5))
  ],
  "Dettmers' four types of 8 bits end": [
    trained("dynamic-tree", 90.05, 90.95)
    + trained("linear", 89.95, 91.05 - step)
    + trained("mantissa", 90.05, 90.95 - 2 * step)
    + trained("static-tree", 89.95, 91.05 - 3 * step)
    for step in (0.0, 5.0)
  ],
  "RedSync has": [
    trained("f32", 50.0, 51.0, network="lstm")
    + trained("redsync-1", 50.0, 51.0, network="lstm", loss=loss)
    for loss in (1.009, 1.011)
  ],
  "Communication falls": (line(b32=1, b4=0.9), line(b32=1, b4=1.1)),
  "1-bit SGD in buckets of 64 is rarely": (
    link("1gbit", onebit_64=2.0, qsgd_4=1.0),
    link("1gbit", onebit_64=1.0, qsgd_4=2.0),
  ),
  "The time of a sample": (
    line(b32=1, b8=0.252, b4=0.127, b2=0.07),
    line(b32=1, b8=1.2, b4=0.1, b2=0.07),
  ),
  "2 bits rarely": (line(b4=0.4, b2=0.3), line(b4=0.9, b2=0.1)),
  "Float32 on a fast": [SLOW + link("loopback", f32=step) for step in (2.0, 4.0)],
  "Twice the workers": [
    timed("f32", 4.0, 1.0) + timed("f32", step, communication, workers=4, hosts=4)
    for step, communication in ((3.0, 1.5), (1.8, 0.4))
  ],
  "The gain rises": [
    timed("f32", 4.0, network="lenet-x8", megabytes=9.0)
    + timed("qsgd-8", first, network="lenet-x8", megabytes=9.0)
    + timed("f32", 4.0, network="lenet-x1")
    + timed("qsgd-8", 3.5, network="lenet-x1")
    for first in (1.5, 0.5)
  ],
}
