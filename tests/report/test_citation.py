"""``citation`` finds the papers of whatever a transformation consists of."""

import functools
import re

import optax
import pytest

import gradcomp
from gradcomp import codecs, exchange
from gradcomp._src.exchange.schedules import AllReduce, Ring
from gradcomp._src.transforms.low_rank import PowerSGD
from gradcomp.optimizers import adam
from tests.support.cases.recipe import RECIPES, make

NO_PAPER = "% Without a paper: "
CODECS = [
  *(codecs.QSGD(), codecs.QSGD(bits=4, levels="nonuniform")),
  *(codecs.OneBit(), codecs.Sign(), codecs.Ternary(), codecs.EightBit()),
  *(codecs.Natural(), codecs.BlockFloat(rounding="stochastic")),
  *(codecs.BlockFloat(scale="e4m3"), codecs.FloatCast(), codecs.FloatCast(scale=2.0)),
  *(codecs.TopK(), codecs.TopK(quantize="mean"), codecs.RandomK()),
  *(codecs.BlockTop(), PowerSGD()),
]
EXCHANGES = [
  *(exchange.AllGather(), exchange.TwoShot(), AllReduce(), Ring()),
  *(exchange.Auto(), exchange.Hierarchical(group_size=2)),
]
FEEDBACK = [gradcomp.ErrorFeedback(), gradcomp.MomentumFeedback()]


def keys(text):
  """The keys of the entries, in their order."""
  return re.findall(r"^@misc\{(\w+),$", text, re.M)


def told(text):
  """The comments in front of each entry, by its key."""
  found = re.findall(r"((?:^% .*\n)+)@misc\{(\w+),$", text, re.M)
  return {key: comments for comments, key in found}


def cited(codec=None, **options):
  given = {"exchange": "local", "feedback": None, "axis_name": "data"} | options
  return gradcomp.citation(gradcomp.compress(codec or codecs.Dense(), **given))


@pytest.mark.parametrize(
  "part, given",
  [
    *((codec, {"codec": codec}) for codec in CODECS),
    *((schedule, {"exchange": schedule}) for schedule in EXCHANGES),
    *((rule, {"codec": codecs.OneBit(), "feedback": rule}) for rule in FEEDBACK),
  ],
  ids=str,
)
def test_every_part_has_a_paper_or_says_so(part, given):
  text, name = cited(**given), type(part).__name__
  none = text.startswith(NO_PAPER) and name in text.split("\n")[0]
  assert none != any(f"% {name}. " in lines for lines in told(text).values())
  assert not none or isinstance(part, exchange.AllGather | AllReduce), text
  assert len(keys(text)) == len(set(keys(text)))


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_found(name):
  text = gradcomp.citation(make(name, axis_name="data", exchange="auto"))
  assert "grubic2018synchronous" in keys(text)  # of an exchange that may be chosen
  documented = RECIPES[name].__doc__.partition("References:")[2]
  papers = re.findall(r"arxiv\.org/abs/([\d.]+)|doi\.org/([^>]+)", documented)
  assert all((number or doi) in text for number, doi in papers)
  # As BibTeX reads it: braces match, and no comment begins an entry.
  for entry in text.split("\n\n"):
    assert entry.count("{") == entry.count("}") and entry.count("@") <= 1


def test_an_entry_says_once_who_uses_the_paper_and_how():
  text = gradcomp.citation(optax.chain(gradcomp.qsgd(), gradcomp.qsgd(bits=8)))
  lines = told(text)["grubic2018synchronous"].split("\n")
  assert len(lines) == len(set(lines))
  assert [line.split(".")[0] for line in lines if "." in line][:1] == ["% QSGD"]


natural, sgd = gradcomp.natural(), optax.sgd(0.1)
RULES = [("w", codecs.Natural()), (".", codecs.OneBit())]
SHARED = {"grads": codecs.Natural(), "params": codecs.QSGD(), "axis_name": "chip"}
ZERO = gradcomp.parallel.zero(optax.adam(0.1), **SHARED)
ROUNDS = {"every": 4, "codec": codecs.BlockTop(), "axis_name": "host"}
local = functools.partial(gradcomp.local.local_steps, ZERO, sgd, **ROUNDS)
STREAMS = "douillard2025streaming"
OF_LOCAL = {
  *("douillard2023diloco", "chen2020scalecom", "rajbhandari2020zero"),
  *("jia2024sdp4bit", "alistarh2017qsgd", "seide2014onebit", "horvath2019natural"),
}
PAPERS = [
  (gradcomp.policy(RULES, exchange="local"), {"horvath2019natural", "seide2014onebit"}),
  (local(), OF_LOCAL),
  (local(fragments=2), OF_LOCAL | {STREAMS}),
  (adam(0.1, variance="doubling"), {"tang2021onebitadam", "lu2022zeroone"}),
  (gradcomp.wrappers.clip_by_local_norm(1.0, axis_name="data"), {"lin2018dgc"}),
]
# Natural in all that optax and this library put around it.
PAPERS += [
  (around, {"horvath2019natural"})
  for around in (
    *(optax.chain(natural, sgd), optax.masked(natural, {"w": True})),
    optax.partition({"a": natural, "b": sgd}, {"w": "a"}),
    optax.MultiSteps(natural, 2).gradient_transformation(),
    *(optax.apply_if_finite(natural, 3), optax.flatten(natural)),
    gradcomp.wrappers.switch([3], [gradcomp.dense(), natural]),
    gradcomp.skip_nonfinite(natural, 3),
  )
]


@pytest.mark.parametrize("optimizer, expected", PAPERS)
def test_papers_of_all_parts_are_found(optimizer, expected):
  found = set(keys(gradcomp.citation(optimizer)))
  assert expected <= found
  assert (STREAMS in found) == (STREAMS in expected)


class Halves(codecs.Codec):
  """A stranger's codec, which has no paper, and here encodes nothing."""

  unbiased, needs_key, tile_size, row_words = False, False, 256, 128
  encode_rows = decode_rows = None


class Published(Halves):
  """A stranger's codec with a paper."""

  citations = (("@misc{doe2030halves,\n  author = {Doe, J.}\n}", "By doe@example."),)


def test_parts_without_a_paper_say_so_and_a_strangers_may_have_one():
  for codec, name in ((None, "Dense"), (Halves(), "Halves")):
    assert cited(codec) == f"{NO_PAPER}{name}, Local, NoFeedback.\n"
  text = cited(codecs.OneBit())
  assert "NoFeedback" in text.split("\n")[0]
  assert set(keys(text)) - {"grubic2018synchronous"} == {"seide2014onebit"}
  text = cited(Published())
  assert told(text)["doe2030halves"] == "% Published. By doe at example.\n"
  assert text.count("@") == len(keys(text))
