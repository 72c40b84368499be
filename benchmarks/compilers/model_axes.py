"""Reads the bytes over each mesh axis of steps whose parameters other axes shard.

  python -m benchmarks.compilers.model_axes

A network of two layers is compiled for eight emulated devices: with a plain mean that
JAX adds under Auto axes, and with gradients exchanged in 4 bits, in plain ``jax.jit``
under Auto axes and under Explicit ones. Of each axis wire_report counts the bytes of a
device in words, which are codes and scales, and in float32. Nothing runs.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from benchmarks.common import cli, tables

EXPLICIT = AxisType.Explicit
FORMS = ("plain mean", "Auto", "Explicit")
SIZES = (256, 1024, 256)  # of inputs, hidden units and outputs
QUICK = (64, 256, 32)
BATCH = 64


class Layout(NamedTuple):
  """A mesh, whose first axis is that of the exchange, and the specs on it."""

  axes: dict[str, int]
  specs: dict[str, P]
  batch: tuple[str, ...]  # the axes that shard it

  @property
  def axis_name(self) -> str:
    return next(iter(self.axes))

  def mesh(self, kind: AxisType) -> Mesh:
    kinds = (kind,) * len(self.axes)
    return jax.make_mesh(tuple(self.axes.values()), tuple(self.axes), kinds)


_TENSOR = {"w": P(None, "model"), "b": P("model"), "v": P("model"), "c": P()}
_BOTH = {"w": P("fsdp", "model"), "b": P("model"), "v": P("model", "fsdp"), "c": P()}
_FSDP = dict.fromkeys("wbvc", P("fsdp"))
LAYOUTS = {
  "tensor parallel": Layout({"data": 4, "model": 2}, _TENSOR, ("data",)),
  "HSDP": Layout({"replica": 2, "fsdp": 4}, _FSDP, ("replica", "fsdp")),
  "both": Layout({"data": 2, "fsdp": 2, "model": 2}, _BOTH, ("data", "fsdp")),
}


def loss_fn(params: Any, batch: Any) -> jax.Array:
  """Returns the loss; it says how arrays are gathered, as Explicit axes ask."""
  known = jax.sharding.get_abstract_mesh().explicit_axes
  rows = "fsdp" if "fsdp" in known else None
  if rows:
    kept = lambda x: tuple(None if name == "fsdp" else name for name in x)
    whole = lambda x: jax.reshard(x, P(*kept(jax.typeof(x).sharding.spec)))
    params = jax.tree.map(whole, params)
  hidden = jax.nn.relu(batch["x"] @ params["w"] + params["b"])
  out = jnp.matmul(hidden, params["v"], out_sharding=P(rows, None) if known else None)
  return jnp.mean((out + params["c"] - batch["y"]) ** 2)


def arrays(layout: Layout, kind: AxisType, sizes: tuple[int, ...]) -> tuple[Any, Any]:
  zeros = lambda shape, spec: jnp.zeros(shape, device=NamedSharding(mesh, spec))
  mesh, (inputs, hidden, outputs) = layout.mesh(kind), sizes
  shapes = dict(w=(inputs, hidden), b=(hidden,), v=(hidden, outputs), c=(outputs,))
  params = {name: zeros(shape, layout.specs[name]) for name, shape in shapes.items()}
  rows = P(layout.batch)
  return params, {"x": zeros((BATCH, inputs), rows), "y": zeros((BATCH, outputs), rows)}


def sent(name: str, form: str, sizes: tuple[int, ...]) -> dict[str, dict[str, int]]:
  """Returns the bytes of a device by axes and by ``words`` or ``float32``."""
  layout = LAYOUTS[name]
  axis_name, kind = layout.axis_name, EXPLICIT if form == "Explicit" else AxisType.Auto
  params, batch = arrays(layout, kind, sizes)
  tx, grad_fn = optax.identity(), jax.value_and_grad(loss_fn)
  if form != "plain mean":
    way: Any = {"axis_name": axis_name, "exchange": "two_shot", "feedback": "error"}
    tx, specs = gradcomp.qsgd(bits=4, **way), None if kind == EXPLICIT else layout.specs
    grad_fn = gradcomp.value_and_grad(loss_fn, axis_name=axis_name, param_specs=specs)
  with jax.set_mesh(layout.mesh(kind)):
    made = functools.partial(gradcomp.init_state, axis_name=axis_name)
    state = made(tx, params) if form == "Auto" else tx.init(params)

  @jax.jit
  def step(params: Any, state: Any, batch: Any) -> Any:
    loss, grads = grad_fn(params, batch)
    updates, state = tx.update(grads, state, params)
    return jax.tree.map(lambda w, u: w - 0.1 * u, params, updates), state, loss

  found = {}
  report = gradcomp.wire_report(step.lower(params, state, batch))
  for axis, part in report.by_axis.items():
    words = sum(c.times * c.bytes_sent for c in part.collectives if c.dtype == "u32")
    found[axis] = {"words": words, "float32": part.bytes_sent - words}
  return found


def markdown(found: dict[str, dict[str, dict[str, dict[str, int]]]]) -> str:
  lines = []
  for name, forms in found.items():
    layout, first = LAYOUTS[name], LAYOUTS[name].axis_name
    mesh = ", ".join(f"{axis} {size}" for axis, size in layout.axes.items())
    for form, by_axis in forms.items():
      own = {axis: part for axis, part in by_axis.items() if axis == first}
      both = {axis: part for axis, part in by_axis.items() if first in axis.split(",")}
      others = {axis: part for axis, part in by_axis.items() if axis not in both}
      total = lambda some, kind: f"{sum(part[kind] for part in some.values()):,}"
      cells = [total(x, k) for x in (own, others) for k in ("words", "float32")]
      rest = {axis: part for axis, part in both.items() if axis != first}
      lines.append([f"{name}: {mesh}", form, *cells, total(rest, "float32")])
  header = ["mesh", "form", "exchange: words", "float32", "other axes: words"]
  return f"{tables.table([*header, 'float32 there', 'both: float32'], lines)}\n"


def main() -> None:
  options = cli.options(__doc__, "a small network", "folder of the two files")
  sizes = QUICK if options.quick else SIZES
  jax.config.update("jax_num_cpu_devices", 8)
  found = {name: {form: sent(name, form, sizes) for form in FORMS} for name in LAYOUTS}
  print(markdown(found))
  if options.output:
    elements = (sizes[0] + 1) * sizes[1] + (sizes[1] + 1) * sizes[2]
    about = {"jax": jax.__version__, "sizes": list(sizes), "elements": elements}
    cli.write(options.output, "model_axes", {**about, "rows": found}, markdown(found))


if __name__ == "__main__":
  main()
