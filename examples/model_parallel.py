"""Trains a net with dense layers sharded over workers, which send activations.

    python -m examples.model_parallel --codec linear
    python -m examples.model_parallel --compare f32 linear qsgd-4 --seeds 3
    python -m examples.model_parallel --channels 32 --passes 4 --checkpoint saved

The net is Dettmers' (2016): two hidden layers with dropout, trained by RMSProp. Each
layer is sharded by its outputs. Workers gather activations after the unit, and scatter
the errors of their inputs, both in the codec. ``--channels`` puts a convolution in
front: each worker has all of it, and its gradients are averaged in float32. Without
accelerators it emulates eight devices on the CPU.
"""

import functools
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

import gradcomp
from examples.lib import comparisons, cut_layers, images
from gradcomp import parallel

AXIS = "model"
COMPARED = ("f32", "dynamic-tree", "static-tree", "linear", "mantissa")
make_parser = functools.partial(
  comparisons.make_layers_parser, __doc__, COMPARED, images.add_arguments
)


class Net:
  """A net on a mesh, with parameters ``{"front": ..., "dense": [{"w", "b"}, ...]}``."""

  def __init__(self, args: Namespace, codec: Any, data: images.ImageSet):
    self.args, self.codec, self.data = args, codec, data
    rate = optax.cosine_decay_schedule(args.learning_rate, args.steps)
    self.front = optax.chain(gradcomp.dense(axis_name=AXIS), optax.rmsprop(rate))
    rules = {"front": self.front, "dense": optax.rmsprop(rate)}
    self.optimizer = optax.partition(rules, {"front": "front", "dense": "dense"})

  def start(self, seed: Any) -> tuple[Any, Any]:
    """Draws parameters and makes the state; equal seeds give equal ones."""
    key, own = jax.random.split(jax.random.key(seed))
    params = cut_layers.init_net(key, own, self.data, self.args)
    kept, key = self.optimizer.init(params), jax.random.key_data(key)
    return params, {"rmsprop": kept, "key": key, "count": jnp.int32(0)}

  def recorded(self, init: Any, seed: int) -> tuple[Any, Any]:
    """Returns parameters and state, and what a checkpoint records: the front alone."""
    params, state = init(seed)
    return (params, state), {"optimizer": self.front, "params": params["front"]}

  def logits(self, params: Any, images: jax.Array, key: jax.Array, **dropout: Any):
    """Returns ``[passes, B / passes, classes]``, in the order of ``in_passes``."""
    args, last = self.args, len(params["dense"]) - 1
    codec_key = key if self.codec.needs_key else None
    sent = {"axis_name": AXIS, "codec": self.codec, "own": args.own}

    def dense(x: jax.Array, number: jax.Array) -> jax.Array:
      used = jax.random.fold_in(key, number)

      def gather(y: jax.Array, layer: int) -> jax.Array:
        own = {"key": None if codec_key is None else jax.random.fold_in(used, layer)}
        if layer == last:  # logits are equal on all workers, and so are their errors
          own |= {"own": "coded", "to": "invarying"}
        # This line compresses activations, and their errors in the backward pass.
        return parallel.all_gather(y, axis=1, **(sent | own))

      own_key = jax.random.fold_in(used, last + 1 + lax.axis_index(AXIS))
      options = {"unit": args.unit, "key": used, "own_key": own_key, **dropout}
      given = params["dense"], x, self.data.classes
      return cut_layers.apply(*given, gather=gather, **options)

    x = cut_layers.features(params["front"], images)
    if params["front"]:
      return cut_layers.sub_batches(dense, x, passes=args.passes, key=codec_key, **sent)
    parts = cut_layers.in_passes(x, lax.axis_size(AXIS), args.passes)
    return lax.map(lambda given: dense(*given), (parts, jnp.arange(args.passes)))

  def sums(self, params: Any, batch: Any, key: Any, **dropout: Any) -> jax.Array:
    """Returns the sums of losses and of right classes; -1 is no label."""
    images, labels = batch
    labels = cut_layers.in_passes(labels, lax.axis_size(AXIS), self.args.passes)
    logits = self.logits(params, images, key, **dropout)
    known = jnp.maximum(labels, 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, known)
    each = losses, logits.argmax(axis=-1) == labels
    return jnp.array([jnp.sum(x * (labels >= 0)) for x in each])

  def step(self, params: Any, state: Any, batch: Any) -> Any:
    """Takes a step, inside the map."""
    key = jax.random.fold_in(jax.random.wrap_key_data(state["key"]), state["count"])
    # Each worker's own gradient of the front, which the exchange averages.
    own = gradcomp.defer_reduction(params["front"], axis_name=AXIS)
    sums = functools.partial(self.sums, dropout=cut_layers.DROPOUT)
    loss_fn = lambda params: sums(params, batch, key)[0] / self.args.batch_size
    loss, grads = jax.value_and_grad(loss_fn)(params | {"front": own})
    # The loss is that of the whole batch, so workers' gradients are to be added up.
    grads["front"] = jax.tree.map(lambda g: g * lax.axis_size(AXIS), grads["front"])
    updates, kept = self.optimizer.update(grads, state["rmsprop"])
    state = state | {"rmsprop": kept, "count": state["count"] + 1}
    return optax.apply_updates(params, updates), state, {"loss": loss}


def main(argv: Sequence[str] | None = None) -> None:
  """Trains with the options given, prints the table and writes the files."""
  parser = make_parser()
  comparison = comparisons.begin_layers(parser, argv, AXIS)
  args, mesh = comparison.args, comparison.mesh
  data = images.load(args.dataset, args.data_dir)
  images.fits(parser, args, data.train)
  draw = functools.partial(images.batches, data.train, args.batch_size)
  tests = images.in_order(data.test, args.batch_size)
  over = functools.partial(jax.shard_map, mesh=mesh)
  # Where samples of a convolution lie, and labels; dense layers take the whole batch.
  cut = (jax.P(AXIS) if args.channels else jax.P()), jax.P()
  on = lambda specs: jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs)
  place = lambda batch: jax.device_put(tuple(batch), on(cut))
  for name, codec in comparison.methods.items():
    net = Net(args, codec, data)
    specs = cut_layers.specs(jax.eval_shape(net.start, 0), AXIS)
    init = jax.jit(net.start, out_shardings=on(specs))
    sums = functools.partial(net.sums, key=jax.random.key(0))
    sums = jax.jit(over(sums, in_specs=(specs[0], cut), out_specs=jax.P()))
    step = over(net.step, in_specs=(*specs, cut), out_specs=(*specs, jax.P()))
    step = jax.jit(step, donate_argnums=(0, 1))
    step = step.lower(*init(0), place(next(draw(seed=0)))).compile()
    start = functools.partial(net.recorded, init)
    for run, first in comparison.runs(name, step, start):  # from each seed
      batches = draw(seed=run.seed)
      params, state = run.restore(first, batches)
      for _ in run.steps():
        params, state, _ = run.take(step, params, state, place(next(batches)))
        if run.is_tested:
          totals = sum(jax.device_get(sums(params, place(x))) for x in tests)
          run.add_point(*(totals / len(data.test.labels)).tolist())
        run.save((params, state))
  comparison.show(f"dense layers sharded over {mesh.size} workers, {args.dataset}")


if __name__ == "__main__":
  main()
