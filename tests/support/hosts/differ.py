"""Steps that one process of two traces otherwise: what each of them is told.

Nothing is computed. A step that went on would wait for the other process for ever.
"""

import collections
import dataclasses
import json
import os
import warnings
from unittest import mock

import jax
import jax.numpy as jnp

import gradcomp
from gradcomp._src.kernels.gpu import self_check
from gradcomp._src.kernels.quantize import pallas, reference
from tests.support.cases import agreement
from tests.support.hosts.averaging import QSGD4


def kernels(host):
  """Traces an update, whose kernel fails on one process; returns whether it is in it.

  A device of the CPU stands for the GPU. The update's own kernel is for CUDA alone.
  """

  def encode_rows(*operands, interpret=False, **options):
    rows, residual = reference.encode_rows(*operands, **options)
    return rows + jnp.uint32(host), residual

  encode_rows.__module__ = "fake"

  def kernels_in(codec):
    step = agreement.step_of(gradcomp.compress(codec, axis_name="data"))
    traced = jax.make_jaxpr(step)(jnp.ones((64, 256)))
    return str(traced).count("gradcomp_kernel")

  with (
    mock.patch.object(self_check, "_gpus", lambda: jax.local_devices()[:1]),
    mock.patch.object(self_check, "_TIMED_ELEMENTS", 1 << 12),
    mock.patch.object(pallas, "encode_rows", encode_rows),
    warnings.catch_warnings(record=True) as caught,
  ):
    warnings.simplefilter("always")
    of_xla = kernels_in(dataclasses.replace(QSGD4, implementation="xla"))
    more = kernels_in(QSGD4) - of_xla
  return {"kernels": more, "said": [str(warning.message) for warning in caught]}


def order(*names):
  leaves = collections.OrderedDict((name, agreement.A) for name in names)
  agreement.trace(agreement.compressed(), leaves)


def exchange(name):
  agreement.trace(agreement.compressed(exchange=name))


def fails(params, batch):
  raise ZeroDivisionError("of this process alone")


# What each process traces, by its number.
CASES = {
  "order": lambda host: order(*("ab", "ba")[host]),
  "exchange": lambda host: exchange(("two_shot", "ring")[host]),
  "failed": lambda host: agreement.usual(loss=fails if host == 1 else None),
  "same": lambda host: agreement.usual(),
  "kernels": kernels,
  "silent": lambda host: exchange("ring") if host == 0 else None,
}


def differ(host, folder):
  """Saves what the process is told."""
  told = {}
  for name, run in CASES.items():
    if name == "silent":
      os.environ["GRADCOMP_PATIENCE_SECONDS"] = "1"
    try:
      told[name] = run(host)
    except (ValueError, ZeroDivisionError) as error:
      told[name] = str(error)
  (folder / f"told.{host}.json").write_text(json.dumps(told))
