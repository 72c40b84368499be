"""Compiles steps for devices that are not here, and keeps what tests need of the text.

  python -m tests.report.record_hlo NAME ...

Needs libtpu for names that begin with "tpu", and JAX's CUDA plugin for "h200"; the
environment is that of benchmarks/compilers/targets.py. A text is cut to its collectives
and to what says how often they run and what they send. All else is a custom call
without operands, and layouts are left out. So it has some kilobytes, and the same
report.
"""

import argparse
import functools
import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from benchmarks.compilers import steps
from benchmarks.compilers.targets import TARGETS
from gradcomp._src.report.hlo_text import read_module
from gradcomp._src.report.scopes import cutting_in
from gradcomp._src.report.sends import kind_of
from gradcomp.wire import wire_report

FOLDER = Path(__file__).parent / "hlo" / "compiled"
_KEPT = frozenset(
  "add after-all bitcast compare constant copy copy-done copy-start dynamic-slice "
  "get-tuple-element multiply parameter partition-id recv recv-done reshape slice "
  "transpose tuple".split()
)
_ATTRIBUTES = frozenset(
  "channel_id custom_call_target device_ids dimensions direction dynamic_slice_sizes "
  "frontend_attributes index is_host_transfer kind replica_groups slice slice_sizes "
  "source_target_pairs use_global_device_ids".split()
)
_CONFIG = re.compile(r'"(?:known_trip_count|quantized_all_reduce_config)":\{[^{}]*\}')


def step(mesh, transformation, widths, rows=64, **options):
  """A train step of dense layers of these widths."""
  names = mesh.axis_names[0] if len(mesh.axis_names) == 1 else mesh.axis_names
  placed = lambda x, spec: jax.ShapeDtypeStruct(
    x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
  )
  optimizer = optax.chain(transformation(axis_name=names), optax.sgd(0.1))
  params = [jax.ShapeDtypeStruct((w, w), jnp.float32) for w in widths]
  params = [placed(x, P()) for x in params]
  with jax.set_mesh(mesh):
    state = jax.eval_shape(optimizer.init, params)
  specs = gradcomp.state_specs(state, axis_name=names)
  state = jax.tree.map(placed, state, specs)

  def loss(params, x):
    for w in params:
      x = jnp.tanh(x[:, : w.shape[0]] @ w.astype(jnp.bfloat16))
    return jnp.mean(x.astype(jnp.float32) ** 2)

  x = jax.ShapeDtypeStruct((rows * mesh.size, max(widths)), jnp.bfloat16)
  train = gradcomp.make_train_step(loss, optimizer, axis_name=names, mesh=mesh)
  lowered = train.lower(params, state, placed(x, P(mesh.axis_names)))
  return lowered.compile(options).as_text()


def fsdp(mesh):
  """The gradient of weights that are sharded over the workers."""
  sharding = NamedSharding(mesh, P("data"))
  w = jax.ShapeDtypeStruct((1024, 512), jnp.float32, sharding=sharding)
  x = jax.ShapeDtypeStruct((8192, 1024), jnp.float32, sharding=sharding)
  grad = jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w)))
  return jax.jit(grad, out_shardings=sharding).lower(w, x).compile().as_text()


def of_table(target, case):
  """A train step of the table of steps."""
  return steps.row(target, steps.cases(target, "all")[case])[1]


one = lambda target: TARGETS[target].mesh()
two = TARGETS["2 slices of v5e"].mesh
_Q4 = functools.partial(gradcomp.qsgd, bits=4)
_MESSAGES = functools.partial(_Q4, message_bytes=150_000)
_LEVEL = {"xla_tpu_quantized_all_reduce_level": "3"}
PROGRAMS = {
  "tpu_async_fusions": lambda: step(
    one("v5e"), functools.partial(_Q4, message_bytes=2_000_000), [2048] * 4, 2048
  ),
  "tpu_ring": lambda: step(
    one("v5e"), functools.partial(_Q4, exchange="ring"), [512] * 2
  ),
  "tpu_fsdp": lambda: fsdp(one("v5e")),
  "tpu_quantized": lambda: step(one("v5e"), gradcomp.dense, [1024] * 2, **_LEVEL),
  "tpu_split_sum": lambda: of_table("tpu7x", "randomk, scanned, shard_map"),
  "tpu_sparsecore": lambda: step(one("tpu7x"), _Q4, [512] * 2),
  "tpu_two_slices": lambda: step(two(), _Q4, [512] * 2),
  "tpu_two_slices_hierarchical": lambda: step(
    two({"slice": 2, "chip": 4}),
    functools.partial(_Q4, exchange="hierarchical"),
    [512] * 2,
  ),
  "tpu_two_slices_ring": lambda: step(
    two(), functools.partial(_Q4, exchange="ring"), [512] * 2
  ),
  "h200_messages": lambda: step(one("H200"), _MESSAGES, [512] * 4),
  "h200_one_sum": lambda: step(
    one("H200"),
    functools.partial(gradcomp.randomk, density=0.01, message_bytes=150_000),
    [512] * 4,
  ),
  "h200_sums": lambda: step(
    one("H200"), functools.partial(gradcomp.powersgd, rank=4), [512] * 4
  ),
  "h200_combined": lambda: step(one("H200"), _MESSAGES, [512, 512, 256, 256]),
}


def cut(text):
  """Returns a text with the same collectives."""
  module = read_module(text)
  bodies = module.computations
  holds, more = (
    set(),
    {name for name, body in bodies.items() if any(map(kind_of, body))},
  )
  while more - holds:
    holds |= more
    more = {
      name for name, body in bodies.items() if any(_calls(x) & holds for x in body)
    }
  callers = [
    x for name in holds for x in bodies[name] if kind_of(x) or _calls(x) & holds
  ]
  others = set().union(*map(_calls, callers)) - holds  # sums, and conditions of loops
  cutting = cutting_in(module)  # of a sum, the parts that have names
  kept = {name: [*_lines(bodies[name], holds, cutting)] for name in holds}
  read = set(
    re.findall(r"calls=%([^\s,]+)", "\n".join(itertools.chain(*kept.values())))
  )
  kept |= {name: [*map(_line, bodies[name])] for name in others | (read & cutting)}
  header = f"replica_count={module.replicas}, num_partitions={module.partitions}"
  lines = [f"HloModule {module.entry}, is_scheduled=true, {header}"]
  for name in bodies:
    if name in kept:
      lines += ["", f"{'ENTRY ' * (name == module.entry)}%{name} {{"]
      lines += [*(f"  {line}" for line in kept[name]), "}"]
  return "\n".join(lines) + "\n"


def _calls(x):
  return set(itertools.chain(*x.calls.values()))


def _lines(body, holds, cutting):
  """Yields the instructions that collectives and calls of ``holds`` need."""
  named = {x.name: x for x in body}
  main = [x for x in body if kind_of(x) or _calls(x) & holds]
  # What takes a collective's result, as it is or in parts, has its name.
  ends = [x for x in body if x.opcode == "recv"]
  nameless, users = {x.name for x in main + ends if not x.op_name}, []
  for x in body:
    ends = x.opcode.endswith("-done") or _calls(x) & cutting
    moves = ends or x.opcode in _KEPT
    if nameless.intersection(x.operands) and moves:
      users.append(x)
      nameless |= set() if x.op_name else {x.name}
  always = [x for x in body if x.opcode in ("parameter", "recv") or x.is_root]
  kept, stubs, todo = set(), set(), [*main, *users, *always]
  while todo:
    x = todo.pop()
    is_kept = (
      x in main or x in users or (x.opcode in _KEPT and len(str(x.arguments)) < 2000)
    )
    if x.name not in kept | stubs:
      (kept if is_kept else stubs).add(x.name)
      todo += [named[name] for name in x.operands] if is_kept else []
  for x in body:
    if x.name in kept:
      yield _line(x)
    elif x.name in stubs:
      left = {"custom_call_target": '"left_out"'}
      left |= {"metadata": f'{{op_name="{x.op_name}"}}'} if x.op_name else {}
      yield _line(x._replace(opcode="custom-call", arguments=(), attributes=left))


def _line(x):
  attributes = {key: value for key, value in x.attributes.items() if key in _ATTRIBUTES}
  for key, names in x.calls.items():
    several = "{" + ", ".join(f"%{name}" for name in names) + "}"
    attributes[key] = several if "{" in x.attributes[key] else f"%{names[0]}"
  if x.op_name:
    attributes["metadata"] = f'{{op_name="{x.op_name}"}}'
  if found := _CONFIG.findall(x.backend_config):
    attributes["backend_config"] = f"{{{','.join(found)}}}"
  shape = x.type if "E(" in x.type else re.sub(r"\{[^{}]*\}", "", x.type)
  text = f"{x.opcode}({', '.join(x.arguments)})"
  parts = [text, *(f"{key}={value}" for key, value in attributes.items())]
  return f"{'ROOT ' * x.is_root}%{x.name} = {shape} {', '.join(parts)}"


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("names", nargs="+", choices=PROGRAMS)
  for name in parser.parse_args().names:
    text = PROGRAMS[name]()
    short = cut(text)
    if str(wire_report(short)) != str(wire_report(text)):
      raise AssertionError(f"{name} changes its report where it is cut.")
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.hlo").write_text(short)


if __name__ == "__main__":
  main()
