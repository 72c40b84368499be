"""Checks that every kernel gives the reference's bits on the GPU of this machine.

  make gpu-check     or     python -m benchmarks.gpu.check

The reference runs on the CPU. Rows and residuals of ordinary gradients must be the same
bit for bit, for gradients of one tile, of several, and of a part of one. The same holds
in a typed shard_map. Where a gradient holds NaN, infinities, zeros and subnormal
numbers, the values that rows stand for must be the same, NaN for NaN. They may differ
by one subnormal number, because CPUs flush those to zero. A train step with QSGD must
run the kernel. Where XLA's own code for the GPU gives other bits, the check says so,
and passes. The library's own check of a kernel must pass, too. Kernels that
gpu/speed.py times come first; those left when time ends are listed so, and --left
checks them and adds them to the record.

Cases run in processes of their own, so that a kernel that breaks the GPU's context
fails alone. Writes benchmarks/results/gpu/gpu_check.json. The exit status is 1 where
anything is wrong or left, and 77 where there is no GPU. With --interpret, Pallas
interprets the kernels on any machine, which tries the script and no GPU.
"""

import collections
import concurrent.futures
import datetime
import functools
import json
import os
import subprocess
import sys
import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import gradcomp
from benchmarks.common import cli
from benchmarks.gpu.cases import CASES, Case, Kernels, gradients, with_strange
from gradcomp._src.kernels.gpu.dispatch import Implementation

RESULTS = cli.RESULTS / "gpu" / "gpu_check.json"
_STEPS = {f"train step, {bits} bit": bits for bits in (8, 4)}
_QUICK = ("float_cast (3, 0) nearest_even", "eight_bit linear, blocks, nearest")
_PROCESSES = min(16, os.cpu_count() or 1)
_note = functools.partial(print, "note:", file=sys.stderr, flush=True)
_SUBNORMAL = 2.0**-126 - 2.0**-149  # the largest: by so much may values differ
_KERNEL = "mosaic_gpu"  # what XLA calls Pallas kernels

Arrays = list[tuple[np.ndarray, ...]]


def check(name: str, kernels: Kernels = None) -> list[str]:
  """Returns a line for each thing that is wrong with a case, or with a train step."""
  if name in _STEPS:
    return train_step(_STEPS[name])
  case = CASES[name]
  cpu, device = jax.devices("cpu")[0], jax.devices()[0]
  plain = [gradients(size, seed) for seed, size in enumerate(case.sizes())]
  inputs = plain + [with_strange(x, case.strange) for x in plain]
  with jax.default_device(cpu):
    operands = lambda x: jax.jit(lambda x: case.operands(case.codec, x))(x)
    given = [(x, *jax.device_get(operands(x))) for x in inputs]
  expected = _run(case, "xla", given, cpu)
  wrong = []
  for implementation in kernels or case.implementations:
    found = _run(case, implementation, given, device)
    wrong += _differences(case, implementation, expected, found)
    if implementation == "pallas_interpret":  # has no types of jax.shard_map
      continue
    found = _run(case, implementation, given[: len(plain)], device, mapped=True)
    wrong += _differences(case, f"{implementation} in shard_map", expected, found)
  found = _run(case, "xla", given[: len(plain)], device)
  for note in _differences(case, "xla", expected, found):
    _note(f"{name}: {note}")
  return wrong


def _run(
  case: Case, by: Implementation, given: Arrays, device: jax.Device, *, mapped=False
) -> Arrays:
  """Encodes each of several inputs on a device, and returns the outputs."""
  function = case.function(by)
  if mapped:
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("data",), axis_types=auto, devices=[device])
    # What workers agree on, such as an exponent, is the same for all.
    specs = tuple(P("data") if np.ndim(array) else P() for array in given[0])
    function = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P("data"))
  jitted = jax.jit(lambda given: [function(*operands) for operands in given])
  count = len(case.sizes())  # the same shapes again and again: compiled once
  with jax.default_device(device):
    parts = [jitted(given[k : k + count]) for k in range(0, len(given), count)]
    return [outputs for part in parts for outputs in jax.device_get(part)]


def _differences(case: Case, title: str, expected: Arrays, found: Arrays) -> list[str]:
  """Lists outputs of ordinary gradients whose bits differ, and others not near."""
  lines, sizes = [], case.sizes()
  for number, (right, arrays) in enumerate(zip(expected, found, strict=False)):
    size, by_value = sizes[number % len(sizes)], number >= len(sizes)
    place = f"{title}, {size:,} elements{' with special values' * by_value}"
    if by_value:
      with jax.default_device(jax.devices("cpu")[0]):
        given = (tuple(map(jnp.asarray, outputs)) for outputs in (right, arrays))
        right, arrays = jax.device_get([*map(case.values, given)])
    for a, b in zip(right, arrays, strict=True):
      near = np.isclose(a, b, rtol=0, atol=_SUBNORMAL, equal_nan=True)
      same = near if by_value else a.view(np.uint32) == b.view(np.uint32)
      if not same.all():
        at = int(np.argmin(same.reshape(-1)))
        lines.append(
          f"{place}: {same.size - same.sum():,} of {same.size:,} differ, the first "
          f"at {at}: {b.reshape(-1)[at]!r} instead of {a.reshape(-1)[at]!r}"
        )
  return lines


def train_step(bits: int) -> list[str]:
  """Checks that a whole step with error feedback runs the kernel, and learns."""
  mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32) / 16)
  params: Any = {"first": draw(128, 256), "second": draw(256, 128)}
  batch = rng.standard_normal((64, 128), np.float32)
  outputs = lambda params, x: jnp.tanh(x @ params["first"]) @ params["second"]
  loss_fn = lambda params, x: jnp.mean((outputs(params, x) - x[:, ::-1]) ** 2)
  way: Any = {"axis_name": "data", "feedback": "error", "exchange": "all_gather"}
  exchange = gradcomp.qsgd(bits=bits, implementation="pallas", **way)
  optimizer = optax.chain(exchange, optax.adam(1e-2))
  with jax.set_mesh(mesh):
    params = jax.device_put(params, jax.NamedSharding(mesh, P()))
    state = optimizer.init(params)
  step = gradcomp.make_train_step(loss_fn, optimizer, axis_name="data", mesh=mesh)
  compiled = step.lower(params, state, batch).compile()
  lines = compiled.as_text().splitlines()
  count = sum(_KERNEL in line and "qsgd_encode" in line for line in lines)
  losses = []
  for _ in range(20):
    params, state, metrics = compiled(params, state, batch)
    losses.append(float(metrics["loss"]))
  told = f"{count} of its custom calls are kernels of QSGD"
  _note(f"train step, {bits} bit: {told}, loss {losses[0]:.3f} to {losses[-1]:.3f}")
  wrong = [] if count else [f"no {_KERNEL} named qsgd_encode is in the compiled step"]
  return wrong + ([] if losses[-1] < losses[0] / 2 else [f"the losses are {losses}"])


def run_here(names: list[str], interpret: bool) -> None:
  """Checks cases in this process, and prints a line of JSON for each."""
  for name in names:
    try:
      wrong = check(name, ("pallas_interpret",) if interpret else None)
      if name in CASES and not interpret and not wrong:
        case = CASES[name]
        # The library compares a kernel, as users ask it to; RuntimeError if wrong.
        with mock.patch.dict(os.environ, GRADCOMP_CHECK_KERNELS="1"):
          jax.eval_shape(case.function("pallas"), *case.structs(case.sizes()[-1]))
    except Exception as error:
      # The GPU may be unusable now: the others run in another process.
      print(json.dumps([name, [f"{type(error).__name__}: {error}"[:2000]]]), flush=True)
      raise
    print(json.dumps([name, wrong]), flush=True)


def run_apart(names: list[str], end: float, *options: str) -> dict[str, list[str]]:
  """Checks cases in a process, and what that leaves undone in another, until an end."""
  found: dict[str, list[str]] = {}
  while left := [name for name in names if name not in found]:
    seconds = end - time.monotonic()
    if seconds <= 0:
      return found
    command = cli.module("benchmarks.gpu.check", "--here", *options, "--cases", *left)
    way: Any = {"env": os.environ | cli.path(), "stdout": subprocess.PIPE}
    try:
      output = subprocess.run(command, timeout=seconds, **way).stdout
    except subprocess.TimeoutExpired as error:
      output = error.stdout or b""
    lines = [x for x in output.decode().splitlines() if x.startswith("[")]
    found |= dict(json.loads(line) for line in lines)
    if not lines and time.monotonic() < end:
      found[left[0]] = ["its process ended without a word"]
  return found


def main() -> None:
  parser = cli.parser(__doc__, "two cases", RESULTS)
  names = [*_STEPS, *sorted(CASES, key=lambda name: not CASES[name].timed)]
  parser.add_argument("--cases", nargs="+", choices=names)
  parser.add_argument("--seconds", type=float, default=240, help="for all of it")
  parser.add_argument("--left", action="store_true", help="what the record lists so")
  parser.add_argument("--interpret", action="store_true", help="try without a GPU")
  parser.add_argument("--here", action="store_true", help="in this process")
  options = parser.parse_args()
  # Several processes share the GPU's memory.
  os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
  if jax.default_backend() != "gpu" and not options.interpret:
    cli.skip("there is no GPU here; --interpret tries the script without one")
  if options.here:
    run_here(options.cases, options.interpret)
    return
  end = time.monotonic() + options.seconds
  cases, passed, output = names, [], RESULTS
  if options.interpret:
    cases, passed, output = list(CASES), ["--interpret"], None
    cli.compile_fast()
  if options.quick:
    cases, output = _QUICK, None
  cases, output = options.cases or cases, options.output or output
  found: dict[str, list[str]] = {}
  if options.left:
    record = json.loads(RESULTS.read_text())
    cases, found = record["left"], record["wrong"] | dict.fromkeys(record["right"], [])
  shares = [cases[k::_PROCESSES] for k in range(_PROCESSES)]
  with concurrent.futures.ThreadPoolExecutor(_PROCESSES) as pool:
    apart = pool.map(lambda share: run_apart(share, end, *passed), shares)
    found |= collections.ChainMap(*apart)
  wrong = {name: lines for name, lines in found.items() if lines}
  left = [name for name in cases if name not in found]
  result: Any = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
  result["date"] = datetime.date.today().isoformat()
  right = sorted(found.keys() - wrong.keys())
  result |= {"right": right, "wrong": wrong, "left": left}
  cli.write_json(output, result)
  for name, lines in wrong.items():
    print(f"WRONG: {name}", *lines, sep="\n  ")
  for name in left:
    print(f"no time was left for {name}")
  print(f"gpu_check: {len(found) - len(wrong)} of {len(found) + len(left)} are right")
  sys.exit(bool(wrong or left))


if __name__ == "__main__":
  main()
