"""``citation`` finds the papers of whatever a transformation consists of."""

import re

import jax.numpy as jnp
import optax
import pytest

import gradcomp
from gradcomp import codecs, exchange
from tests.support.cases.recipe import RECIPES, make

NO_PAPER = "% Without a paper: "
CODECS = [
  codecs.QSGD(),
  codecs.QSGD(bits=4, levels="nonuniform"),
  codecs.OneBit(),
  codecs.Sign(),
  codecs.Ternary(),
  codecs.EightBit(),
  codecs.Natural(),
  codecs.BlockFloat(rounding="stochastic"),
  codecs.BlockFloat(scale="e4m3"),
  codecs.Dense(),
  codecs.FloatCast(),
  codecs.FloatCast(scale=2.0),
  codecs.TopK(),
  codecs.TopK(quantize="mean"),
  codecs.RandomK(),
  codecs.BlockTop(),
  codecs.PowerSGD(),
]
EXCHANGES = [
  exchange.Auto(),
  exchange.AllGather(),
  exchange.TwoShot(),
  exchange.AllReduce(),
  exchange.Ring(),
  exchange.Hierarchical(group_size=2),
  exchange.Local(),
]
FEEDBACK = [None, gradcomp.ErrorFeedback(), gradcomp.MomentumFeedback()]


def keys(text):
  """The keys of the entries, in their order."""
  return re.findall(r"^@misc\{(\w+),$", text, re.M)


def told(text):
  """The comments in front of each entry, by its key."""
  return {
    key: comments
    for comments, key in re.findall(r"((?:^% .*\n)+)@misc\{(\w+),$", text, re.M)
  }


def compress(codec=codecs.Dense(), **options):  # noqa: B008
  return gradcomp.compress(codec, axis_name="data", **options)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_every_codec_has_a_paper_or_says_so(codec):
  text = gradcomp.citation(compress(codec, exchange="local", feedback=None))
  name = type(codec).__name__
  assert any(f"% {name}. " in lines for lines in told(text).values()) or (
    codec == codecs.Dense() and f"{NO_PAPER}{name}" in text
  )
  assert len(keys(text)) == len(set(keys(text)))


@pytest.mark.parametrize("schedule", EXCHANGES, ids=str)
def test_every_exchange_has_a_paper_or_says_so(schedule):
  text = gradcomp.citation(compress(exchange=schedule, feedback=None))
  name = type(schedule).__name__
  none = text.startswith(NO_PAPER) and name in text.split("\n")[0]
  assert none != any(f"% {name}. " in lines for lines in told(text).values())


@pytest.mark.parametrize("feedback", FEEDBACK, ids=str)
def test_every_feedback_has_a_paper_or_says_so(feedback):
  codec = codecs.OneBit()
  text = gradcomp.citation(compress(codec, exchange="local", feedback=feedback))
  found = set(keys(text)) - {"grubic2018synchronous"}
  if feedback is None:
    assert "NoFeedback" in text.split("\n")[0] and found == {"seide2014onebit"}
  else:
    assert any(type(feedback).__name__ in lines for lines in told(text).values())


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_found(name):
  text = gradcomp.citation(make(name, axis_name="data", exchange="auto"))
  assert "grubic2018synchronous" in keys(text)  # of an exchange that may be chosen
  documented = RECIPES[name].__doc__.partition("References:")[2]
  papers = re.findall(r"arxiv\.org/abs/([\d.]+)|doi\.org/([^>]+)", documented)
  found = [number or doi for number, doi in papers]
  assert all(number in text for number in found)
  # As BibTeX reads it: braces match, and no comment begins an entry.
  for entry in text.split("\n\n"):
    assert entry.count("{") == entry.count("}") and entry.count("@") <= 1


def test_an_entry_says_once_who_uses_the_paper_and_how():
  text = gradcomp.citation(optax.chain(gradcomp.qsgd(), gradcomp.qsgd(bits=8)))
  lines = told(text)["grubic2018synchronous"].split("\n")
  assert len(lines) == len(set(lines))
  assert [line.split(".")[0] for line in lines if "." in line][:1] == ["% QSGD"]


AROUND = {
  "chain": lambda tx: optax.chain(tx, optax.sgd(0.1)),
  "masked": lambda tx: optax.masked(tx, {"w": True}),
  "partition": lambda tx: optax.partition({"a": tx, "b": optax.sgd(0.1)}, {"w": "a"}),
  "steps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
  "finite": lambda tx: optax.apply_if_finite(tx, 3),
  "flatten": optax.flatten,
  "switch": lambda tx: gradcomp.wrappers.switch([3], [gradcomp.dense(), tx]),
  "skip": lambda tx: gradcomp.skip_nonfinite(tx, 3),
}


@pytest.mark.parametrize("name", AROUND)
def test_it_is_found_in_what_is_around_it(name):
  optimizer = AROUND[name](gradcomp.natural())
  assert "horvath2019natural" in keys(gradcomp.citation(optimizer))


def test_policies_have_the_papers_of_their_codecs():
  rules = [("w", codecs.Natural()), (".", codecs.OneBit())]
  found = keys(gradcomp.citation(gradcomp.policy(rules, exchange="local")))
  assert {"horvath2019natural", "seide2014onebit"} <= set(found)


def test_local_steps_and_zero_have_papers_and_those_of_their_parts():
  inner = gradcomp.parallel.zero(
    optax.adam(0.1), grads=codecs.Natural(), params=codecs.QSGD(), axis_name="chip"
  )
  options = dict(every=4, codec=codecs.BlockTop(), axis_name="host")
  one, several = (
    gradcomp.citation(
      gradcomp.local.local_steps(
        inner,
        optax.sgd(1.0),
        options=gradcomp.local.LocalOptions(fragments=number),
        **options,
      )
    )
    for number in (1, 2)
  )
  expected = {
    *("douillard2023diloco", "chen2020scalecom", "rajbhandari2020zero"),
    *("jia2024sdp4bit", "horvath2019natural", "alistarh2017qsgd", "seide2014onebit"),
  }
  assert expected <= set(keys(one))
  assert set(keys(several)) - set(keys(one)) == {"douillard2025streaming"}


def test_clipping_has_its_paper():
  text = gradcomp.citation(gradcomp.wrappers.clip_by_local_norm(1.0, axis_name="data"))
  assert keys(text) == ["lin2018dgc"]
  assert told(text)["lin2018dgc"].startswith("% clip_by_local_norm. ")


class Halves(codecs.Codec):
  """A stranger's codec, which has no paper."""

  unbiased, needs_key, tile_size, row_words = False, False, 256, 128

  def encode_rows(self, tiles, context):
    return jnp.zeros((tiles.shape[0], 128), jnp.uint32)

  def decode_rows(self, rows):
    return jnp.zeros((*rows.shape[:-1], 256), jnp.float32)


class Published(Halves):
  """A stranger's codec with a paper."""

  citations = (("@misc{doe2030halves,\n  author = {Doe, J.}\n}", "By doe@example."),)


def test_a_strangers_codec_is_found_with_and_without_a_paper():
  without = gradcomp.citation(compress(Halves(), exchange="local", feedback=None))
  assert without == f"{NO_PAPER}Halves, Local, NoFeedback.\n"
  text = gradcomp.citation(compress(Published(), exchange="local"))
  assert told(text)["doe2030halves"] == "% Published. By doe at example.\n"
  assert text.count("@") == len(keys(text))
