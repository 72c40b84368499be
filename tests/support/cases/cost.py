"""A link, a codec's speed and exchanges, whose seconds are easy to tell by hand."""

import functools
import math

import jax
import jax.numpy as jnp

import gradcomp
from gradcomp import cost
from gradcomp._src.cost.exchange import Breakdown
from gradcomp.cost import Cluster, CodecSpeed, Link

LINK = Link(latency=1e-3, bytes_per_second=1e6)
SPEED = CodecSpeed(encode=1e-6, decode=2e-6, add=3e-6, keep=5e-6)
FREE = CodecSpeed(encode=0.0, decode=0.0, add=0.0)
SIZE = 2**17  # elements, of 32 rows of 520 words at 4 bits: nothing is filled up
PAYLOAD = 32 * 520 * 4
LIKE = {"w": jax.ShapeDtypeStruct((256, 512), jnp.float32)}


@functools.cache
def explain(workers, exchange="two_shot", feedback=None, axis_name="data", **options):
  options |= {"axis_name": axis_name, "exchange": exchange, "feedback": feedback}
  return gradcomp.explain(gradcomp.qsgd(bits=4, **options), LIKE, workers=workers)


def seconds(workers, exchange="two_shot", speed=SPEED, link=LINK, add=0.0, **options):
  size = math.prod(workers) if isinstance(workers, tuple) else workers
  explanation = explain(workers, exchange, **options)
  cluster = Cluster(workers=size, link=link, add=add)
  return cost.exchange_seconds(explanation, cluster, speed)


def codec(breakdown):
  return breakdown.encode, breakdown.add, breakdown.decode


def message(codec=0.0, wire=0.0):
  sent = (("all_reduce", 1.0, wire),)
  return Breakdown(encode=codec / 2, decode=codec / 2, wire=sent)
