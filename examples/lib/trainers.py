"""Problem, mesh and report of the examples in examples/trainers."""

import argparse
import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from types import MappingProxyType
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import AxisType

import gradcomp
from examples.lib import texts
from examples.lib.parsing import positive

WIDTH, CLASSES, BATCH = 64, 4, 64  # inputs, outputs, examples of a step
AXES = MappingProxyType({"data": 8})


def batches(steps: int) -> Iterator[dict[str, np.ndarray]]:
  """Draws inputs, and outputs of a fixed network to be learned."""
  rng = np.random.default_rng(0)
  hidden = rng.standard_normal((WIDTH, WIDTH)) / 8
  out = rng.standard_normal((WIDTH, CLASSES)) / 8
  x = rng.standard_normal((4, BATCH, WIDTH))
  y = np.tanh(x @ hidden) @ out
  for i in range(steps):
    yield {"x": x[i % 4].astype(np.float32), "y": y[i % 4].astype(np.float32)}


def sequences(steps: int) -> Iterator[texts.Tokens]:
  """Draws sequences of bytes of Python's library."""
  return itertools.islice(texts.batches(texts.load().train, 32, 32, seed=0), steps)


def run(step: Any, state: Any, feed: Iterable[Any]) -> tuple[float, Any]:
  """Takes a jitted step for each batch; returns the last loss, and its program."""
  for batch in feed:
    batch = jax.device_put(batch, jax.P("data"))
    state, loss = step(state, batch)
    loss.block_until_ready()  # as emulated devices need
  return float(loss), step.lower(state, batch)


@contextlib.contextmanager
def compiled() -> Iterator[list[Any]]:
  """Collects the programs that a trainer compiles ahead of its steps."""
  programs: list[Any] = []
  compile_own = jax.stages.Lowered.compile

  def kept(self: Any, *given: Any, **options: Any) -> Any:
    programs.append(compile_own(self, *given, **options))
    return programs[-1]

  with mock.patch.object(jax.stages.Lowered, "compile", kept):
    yield programs


def sent(program: Any, mesh: jax.sharding.Mesh, axis: str) -> float:
  """Returns the bytes that a worker sends over an axis, alone or with others."""
  by_axis = gradcomp.wire_report(program, mesh=mesh).by_axis
  return sum(x.bytes_sent for names, x in by_axis.items() if axis in names.split(","))


def main(
  title: str, train: Callable[..., Any], axes: Any = AXES, over: str | None = None
) -> None:
  """Prints losses, and bytes over the first axis, of plain and compressed training.

  ``train(steps, compressed)`` returns the last loss and the lowered program of a step.
  A trainer that makes a mesh like it itself says ``over`` which axis it averages.
  """
  parser = argparse.ArgumentParser(description=title.splitlines()[0])
  parser.add_argument("--steps", type=positive, default=40, help="default: 40")
  steps = parser.parse_args().steps
  jax.config.update("jax_num_cpu_devices", math.prod(axes.values()))
  mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))
  for name, compressed in (("plain", False), ("compressed", True)):
    with contextlib.nullcontext() if over else jax.set_mesh(mesh):
      loss, program = train(steps, compressed)
    number = sent(program, mesh, over or next(iter(axes)))
    print(f"{name}: loss {loss:.4g} after {steps} steps, {number:,.0f} bytes a step")
