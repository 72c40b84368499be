"""Small plans, of few candidates over one link."""

import jax
import jax.numpy as jnp

import gradcomp
from gradcomp._src.cost.planner.candidates import CANDIDATES
from gradcomp.cost import Link, PlanOptions
from tests.support.option_fields import with_options

LIKE = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}  # 64 MiB
BY_NAME = {x.name: x for x in CANDIDATES}
QSGD4 = [BY_NAME["QSGD-4"]]
SMALL = {"w": jax.ShapeDtypeStruct((64, 512), jnp.float32)}
GIGABIT = Link(latency=50e-6, bytes_per_second=125e6)


def plan(params=SMALL, **options):
  """The plan for four workers with 1 Gbit/s, of one candidate unless told."""
  given = dict(workers=4, link=GIGABIT, candidates=QSGD4) | options
  return gradcomp.cost.plan(params, **with_options(PlanOptions, given))


def pair(found):
  """The names of the codec and the exchange that a plan chose."""
  return found.chosen.candidate.name, found.chosen.exchange.name
