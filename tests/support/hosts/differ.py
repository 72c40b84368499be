"""Steps that one process of two traces otherwise: what each of them is told.

Nothing is computed. A step that went on would wait for the other process for ever.
"""

import collections
import json
import os
from unittest import mock

import jax
import jax.numpy as jnp

import gradcomp
from gradcomp._src.kernels import quantize
from gradcomp._src.kernels.gpu import dispatch, table
from tests.support.cases import agreement
from tests.support.hosts.averaging import QSGD4
from tests.support.lowering import all_kernels


def checked(host):
  """Traces an update, whose kernel is wrong on the second process; a CPU is the GPU."""

  def encode_rows(*operands, interpret=False, **options):
    rows, residual = quantize.encode_reference(*operands, **options)
    return rows + jnp.uint32(host), residual

  encoder = dispatch.encoder("qsgd", quantize.encode_reference, encode_rows)
  jax.clear_caches()  # of traces of the kernel that is right
  with (
    mock.patch.dict(os.environ, GRADCOMP_CHECK_KERNELS="1"),
    mock.patch.object(table, "devices", lambda *_: jax.local_devices()[:1]),
    mock.patch.object(quantize, "encode_rows", encoder),
    all_kernels(),
  ):
    step = agreement.step_of(gradcomp.compress(QSGD4, axis_name="data"))
    jax.eval_shape(step, jnp.ones((64, 256)))


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
  "kinds": lambda host: [
    (x.process_index, x.device_kind) for x in table.devices("cpu")
  ],
  "checked": checked,
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
    except (ValueError, ZeroDivisionError, RuntimeError) as error:
      told[name] = str(error)
  (folder / f"told.{host}.json").write_text(json.dumps(told))
