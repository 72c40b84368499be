"""Says which trainings the evidence queue runs, in the order of what they decide.

A launch is a question, and its trainings are those of its settings, each with each of
its codecs. Seeds are the outer loop of a launch, so that a queue that is stopped early
has whole comparisons with fewer seeds. Settings say what differs from those of the
papers. Names that end in ``-paper`` are in cluster_codecs.py.
"""

from typing import NamedTuple

from cluster_networks import TEXTS, defaults
from cluster_settings import Setting


class Arms(NamedTuple):
  """Trainings that are compared: settings, each with each codec.

  Attributes:
    settings: without codecs and seeds.
    codecs: by their names.
    cpu: seconds of one core that a step takes about, which say how long the queue is
      before there are records.
  """

  settings: tuple[Setting, ...]
  codecs: tuple[str, ...]
  cpu: float


class Launch(NamedTuple):
  """A question, and the trainings that answer it.

  Attributes:
    name: a number and a word, which is the name of the file of its records.
    decides: the question.
    arms: that are compared.
    seeds: of each.
  """

  name: str
  decides: str
  arms: tuple[Arms, ...]
  seeds: int = 5


# LeNet on 14 x 14 pixels with the study's rates, to the end.
FASHION = Setting(
  way="emulated",
  network="lenet",
  dataset="fashion-mnist/14",
  codec="f32",
  exchange="auto",
  workers=8,
  rule="fixed",
  batch=128,
  steps=9360,
  epoch=60_000,
  points=20,
  seed=0,
  optimizer="sgd",
  learning_rate=0.05,
  momentum=0.9,
  max_norm=None,
)
# Han, section 4.2: as the records of the study, so that they are one group.
HAN = FASHION._replace(
  dataset="fashion-mnist/7", workers=256, batch=256, steps=117, points=5
)
# Wen, section 4.1: LeNet on MNIST, 10,000 iterations of 64 images.
WEN = FASHION._replace(
  dataset="mnist/14",
  batch=64,
  steps=10_000,
  learning_rate=0.01,
  schedule="polynomial",
  weight_decay=5e-4,
  ema=0.9999,
)
VANILLA = WEN._replace(learning_rate=0.1, momentum=None)
# Wen, table 1: 64 images a worker with 2 workers, and 128 with 16. The text says that
# they are as many, and we follow the table. As there, the latter are a sixteenth of the
# iterations. The mean of the parameters is over more of so short a training than his.
WEN_ADAM = WEN._replace(
  rule="per-worker",
  optimizer="adam",
  learning_rate=2e-4,
  momentum=None,
  schedule="constant",
  weight_decay=0.0,
)
# Fang, section 3: 4 workers with 5 sequences each, vanilla SGD, and a rate that halves
# where three tests in a row, of one every 200 steps, are not better.
WORDS = FASHION._replace(
  network="lstm",
  dataset="brown-words",
  workers=4,
  batch=20,
  steps=8000,
  epoch=34_299,
  points=40,
  learning_rate=20.0,
  momentum=None,
  max_norm=0.25,
  schedule="plateau",
)
# Dettmers, section 3.4: 784-1024-1024-10, RMSProp, and each type sent once.
DETTMERS = FASHION._replace(
  way="data",
  network="dense-relu",
  dataset="mnist",
  workers=4,
  optimizer="rmsprop",
  learning_rate=0.003,
  momentum=None,
  schedule="constant",
)


def _timed(network: str, hosts: int, rate: str) -> Setting:
  """Returns 20 steps on so many hosts, as cluster_study.py times them."""
  usual = defaults(network)
  texts = {"dataset": "brown", "epoch": 172_221, "batch": 32}
  return FASHION._replace(
    way="timed",
    network=network,
    workers=hosts,
    hosts=hosts,
    link=rate,
    steps=20,
    points=0,
    learning_rate=usual.learning_rate,
    momentum=usual.momentum,
    max_norm=usual.max_norm,
    **(texts if network in TEXTS else {}),
  )


_TYPES = ("dynamic-tree", "linear", "mantissa-paper", "static-tree-paper")
_TIMES = ("f32", "qsgd-8", "qsgd-4", "qsgd-2", "onebit-64", "terngrad", "aps-5-2")
_TERNARY = ("f32", "terngrad-paper")
# Wen's arms. His section 4.2 has less weight decay for TernGrad alone: those of _DECAY
# compare with float32 of _EMA, too.
_EMA = FASHION._replace(ema=0.9999, weight_decay=5e-4)
_DECAY = FASHION._replace(ema=0.9999, weight_decay=1e-4)
_NESTEROV = FASHION._replace(nesterov=True)  # Fang's images


def _convolved(network: str) -> Setting:
  """Returns Dettmers' setting of a net with convolutions, which he has on CIFAR."""
  return DETTMERS._replace(
    way="model", network=network, dataset="fashion-mnist/14", schedule="cosine"
  )


def _wen(workers: int, cpu: float) -> Arms:
  """Returns the arms of Wen's figure 3, with momentum and without."""
  ways = WEN._replace(workers=workers), VANILLA._replace(workers=workers)
  return Arms(ways, _TERNARY, cpu)


LAUNCHES = (
  Launch(
    "1-workers",
    "Does a scale of powers of two help floats of 8 bits with 256 workers?",
    (
      Arms(
        (HAN,),
        (
          "f32",
          # Behind :body his table 6, whose last layer is in float32. (3, 0) has no room
          # for a sum of 256, and APS refuses it.
          *(
            f"{way}-{x}-h16{part}"
            for part in ("", ":body")
            for x in ("5-2", "4-3")
            for way in ("aps", "cast")
          ),
        ),
        cpu=1.1,
      ),
    ),
  ),
  Launch(
    "2-mnist",
    "Is TernGrad within 0.22 points of float32 after 10,000 iterations?",
    (
      *(_wen(n, cpu) for n, cpu in {2: 0.02, 4: 0.025, 8: 0.04, 16: 0.08}.items()),
      Arms((WEN_ADAM._replace(workers=2, batch=128),), _TERNARY, cpu=0.05),
      Arms((WEN_ADAM._replace(workers=16, batch=2048, steps=625),), _TERNARY, cpu=0.4),
    ),
  ),
  Launch(
    "3-fashion",
    "Which codecs end at float32's accuracy, where float32 is at its end?",
    (
      Arms(
        (FASHION,),
        (
          *("f32", "qsgd-4-paper", "qsgd-2-paper", "onebit-64"),
          *("dynamic-tree-paper", "aps-5-2", "cast-5-2"),
        ),
        cpu=0.08,
      ),
      Arms((_EMA,), _TERNARY, cpu=0.06),
      Arms((_NESTEROV,), ("f32", "redsync-0.1-paper", "redsync-1-paper"), cpu=0.15),
    ),
  ),
  Launch(
    "4-dettmers",
    "Do four types of 8 bits end at float32's error, in both kinds of parallelism?",
    (
      *(
        Arms(
          tuple(DETTMERS._replace(way=way, network=x) for way in ("data", "model")),
          ("f32", *_TYPES),
          cpu=0.045,
        )
        for x in ("dense-relu", "dense-logistic")
      ),
      Arms((_convolved("local"),), ("f32", *_TYPES), cpu=0.1),
      Arms(
        (_convolved("three-dense"), _convolved("three-dense-updates")),
        ("f32", "dynamic-tree"),
        cpu=0.03,
      ),
    ),
  ),
  Launch(
    "5-words",
    "Does RedSync end at float32's perplexity of words, and by which clipping? Does a "
    "trained LSTM stand 2 bits?",
    (
      Arms((WORDS,), ("f32", "qsgd-2-paper"), cpu=0.35),
      Arms(
        (WORDS._replace(clipping="share"),),
        ("f32", "redsync-1-paper", "redsync-0.1-paper", "redsync-0.1-asq-paper"),
        cpu=0.4,
      ),
      Arms(
        (WORDS._replace(clipping="own"),),
        ("f32", "redsync-1-paper", "redsync-0.1-paper"),
        cpu=0.4,
      ),
    ),
  ),
  Launch(
    "6-times",
    "How many times as fast are steps on one, two and four hosts?",
    tuple(
      Arms(
        tuple(
          _timed(network, hosts, rate)
          for rate in ("1gbit", "loopback")
          for hosts in (1, 2, 4)
        ),
        _TIMES,
        cpu=2.0,
      )
      for network in ("lstm", "transformer", "vgg", "alexnet")
    ),
    seeds=1,
  ),
  Launch(
    "7-pixels",
    "Is it so with all 28 x 28 pixels?",
    (
      Arms(
        (FASHION._replace(dataset="fashion-mnist"),),
        ("f32", "qsgd-4-paper", "qsgd-2-paper", "onebit-64", "aps-5-2"),
        cpu=0.3,
      ),
      Arms((WEN._replace(dataset="mnist"),), _TERNARY, cpu=0.15),
    ),
    seeds=3,
  ),
  Launch(
    "8-fashion",
    "Which of the papers' variants help, and which fail?",
    (
      Arms(
        (FASHION,),
        (
          *("f32", "qsgd-8-paper", "qsgd-2-32-paper"),
          *("qsgd-4-l2-paper", "qsgd-2-l2-paper", "onebit-512", "onebit-column"),
          *("linear-paper", "mantissa-paper", "static-tree-paper"),
          *("aps-4-3", "cast-4-3", "aps-3-0", "cast-3-0"),
        ),
        cpu=0.09,
      ),
      Arms(
        (_EMA,),
        (
          *("f32", "terngrad-paper:body"),
          *(f"terngrad-{c}-paper" for c in ("1.5", "2", "3", "4", "noclip", "global")),
        ),
        cpu=0.08,
      ),
      Arms((_DECAY,), _TERNARY, cpu=0.06),
      Arms((_NESTEROV,), ("f32", "redsync-0.1-asq-paper", "redsync-10-paper"), cpu=0.2),
    ),
  ),
  Launch(
    "9-mnist",
    "Is TernGrad as good with 32 and 64 workers, an image each?",
    (_wen(32, 0.17), _wen(64, 0.33)),
  ),
)
