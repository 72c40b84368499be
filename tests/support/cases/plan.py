"""Plans for the cells of link_speed.json, from what is measured beside its rows."""

import dataclasses
import json

import jax
import jax.numpy as jnp

import gradcomp
from benchmarks.common import shapes
from benchmarks.models import fit_links
from benchmarks.models.package_speeds import NAMES
from gradcomp._src.cost.planner.candidates import packaged_speeds
from gradcomp.codecs import QSGD
from gradcomp.cost import CANDIDATES, Link, PlanOptions
from tests.support.option_fields import with_options

RUNS = fit_links.read_runs(fit_links.LINKS)
LIKE = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}  # 64 MiB
BY_NAME = {x.name: x for x in CANDIDATES}
QSGD4 = [BY_NAME["QSGD-4"]]
SMALL = {"w": jax.ShapeDtypeStruct((64, 512), jnp.float32)}
GIGABIT = Link(latency=50e-6, bytes_per_second=125e6)


def timed(name, /, **changes):
  """A candidate as links/speed.py times it: quantizers keep no residuals there."""
  return dataclasses.replace(BY_NAME[name], **changes)


# What plan knows of the rows of link_speed.json, by the codecs' names there.
ROWS = {
  "bf16": timed("bfloat16", feedback=False, biased=False),
  "qsgd-8": BY_NAME["QSGD-8"],
  "qsgd-4": BY_NAME["QSGD-4"],
  "qsgd-2": timed("QSGD-2", codec=QSGD(bits=2), feedback=False),
  "qsgd-4 shared": timed(
    "QSGD-4", name="QSGD-4 shared", codec=QSGD(bits=4, share_scale=True)
  ),
  "terngrad": BY_NAME["TernGrad"],
  "aps-8": timed("APS (5, 2)", feedback=False, biased=False),
}


def speeds(times):
  """The speeds of codecs on the machine of the links, whose hosts share its cores.

  Sparse codecs have the packaged ones.
  """
  measured = fit_links.read_speeds(
    [json.loads(x.read_text()) for x in fit_links.SPEEDS]
  )
  names = NAMES | {"QSGD-4 shared": "qsgd-4 shared"}
  known = {name: measured[of] for name, of in names.items() if of in measured}
  found = packaged_speeds("cpu") | known
  return {name: speed.times(times) for name, speed in found.items()}


def link_of(run):
  """The link of a run, by parts measured at its rate with as many hosts, or None."""
  parts = {(x["rate"], x["hosts"]) for x in RUNS if x["parts"]}
  runs = [x for x in RUNS if (x["rate"], x["hosts"]) in parts]
  links = zip(runs, fit_links.fit_links(runs), strict=True)
  return next((link for x, link in links if x is run), None)


def codecs_of(run):
  """The codecs of a run's rows that plan knows, by their names there."""
  names = {name.rpartition(" ")[0] for name in run["steps"]}
  return {name: ROWS[name] for name in sorted(names & ROWS.keys())}


def like_of(run):
  """The shapes of a run's gradient."""
  if run["leaves"] == "resnet50":
    return jax.eval_shape(shapes.resnet50)
  size = run["mib"] * 2**20 // 4 // run["leaves"]
  return [jax.ShapeDtypeStruct((size,), jnp.float32)] * run["leaves"]


def plan_of(run, **options):
  """The plan for a run, among the codecs of its rows, with the speeds of its hosts."""
  given = dict(
    workers=run["hosts"],
    link=link_of(run),
    speeds=speeds(run["hosts"]),
    candidates=list(codecs_of(run).values()),
    steps=10**6,
  )
  return plan(like_of(run), **given | options)


def cell(hosts, rate="1gbit"):
  """The run with one leaf at a rate."""
  (run,) = [x for x in RUNS if (x["hosts"], x["rate"], x["leaves"]) == (hosts, rate, 1)]
  return run


def plan(params=SMALL, **options):
  """The plan for four workers with 1 Gbit/s, of one candidate unless told.

  Options are those of ``plan``, and fields of its ``PlanOptions``.
  """
  given = dict(workers=4, link=GIGABIT, candidates=QSGD4) | options
  return gradcomp.cost.plan(params, **with_options(PlanOptions, given))
