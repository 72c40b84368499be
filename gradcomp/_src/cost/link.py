"""A cluster: its links with the seconds of collectives, and the speeds of codecs."""

import dataclasses
import functools
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gradcomp._src import checks
from gradcomp._src.checkpoint.placement import put
from gradcomp._src.codecs.protocol import LeafCodec, payload_of
from gradcomp._src.codecs.sums.records import Context, Leaf
from gradcomp._src.cost import measure, rules
from gradcomp._src.cost.rules import above_0, at_least_0, count
from gradcomp._src.exchange import collectives
from gradcomp._src.mesh.axes import axis_names

CollectiveName = Literal[
  "all_gather", "all_to_all", "reduce_scatter", "all_reduce", "ppermute", "tree"
]
_SIZES = (1 << 16, 1 << 20, 1 << 23, 1 << 26)
_PAYLOADS = 4  # that are added at a time where a codec is measured


def _factors(name: str, given: Any) -> dict[tuple[str, int], float]:
  """Returns factors by collectives and workers; ValueError for all else."""
  if not isinstance(given, Mapping):
    raise ValueError(
      f"`{name}` must be a dict of (collective, workers), got {given!r}."
    )
  found = {}
  for key, value in given.items():
    if not isinstance(key, tuple) or len(key) != 2 or not isinstance(key[0], str):
      raise ValueError(
        f"`{name}` must have pairs of a collective and workers as keys, got {key!r}."
      )
    pair = key[0], count(f"{name}[{key!r}]'s workers", key[1])
    found[pair] = above_0(f"{name}[{key!r}]", value)
  return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link(checks.Checked, rules.Kept):
  """The link that each worker sends and receives on, both at once.

  Attributes:
    latency: the seconds of a message without bytes.
    bytes_per_second: the rate of each direction.
    factor: for (collective, workers), the measured seconds of a byte as a multiple of
      the ideal ones; 1 for all that are not in it. Collectives are named as in
      :func:`gradcomp.cost.collective_seconds`. A permutation counts the workers of its
      longest cycle: two of them swap.

  Raises:
    ValueError: a number is out of its range or not finite, or a key is no such pair.

  Example:
    >>> factor = {("all_gather", 4): 1.5}
    >>> link = gradcomp.cost.Link(latency=50e-6, bytes_per_second=125e6, factor=factor)
    >>> round(gradcomp.cost.collective_seconds("all_gather", 1e6, 4, link), 6)
    0.03615
  """

  latency: float = checks.field(..., rules.SECONDS)
  bytes_per_second: float = checks.field(..., rules.ABOVE_0)
  factor: Mapping[tuple[str, int], float] = dataclasses.field(
    default_factory=dict, hash=False, metadata={"rule": checks.Rule(_factors)}
  )

  def byte_seconds(self, collective: str, workers: int) -> float:
    """Returns the seconds of a byte in a collective of ``workers`` workers."""
    return self.factor.get((collective, workers), 1.0) / self.bytes_per_second

  @classmethod
  def torus(cls, sides: Sequence[int], *, port: float, latency: float) -> "Link":
    r"""Makes the link of a worker of a ring, or of a torus, as inside of a TPU slice.

    A worker has two ports a side, to both neighbors. Algorithms of rings use all
    ports: d sides have :math:`2 d \cdot \mathrm{port}`. In an all-to-all a payload c
    has a p-th for each of p workers, and goes the shorter way. Around a ring of s it
    passes :math:`\sum_k \min(k, s - k) = \lfloor s^2 / 4 \rfloor` links on average. A
    side has two links a worker, so that each of them carries

    .. math:: \frac{\lfloor s^2 / 4 \rfloor}{2 s} c \approx \frac{s}{8} c

    whatever other sides there are. The longest side decides. A permutation of all
    workers, to their neighbors, takes one port.

    Args:
      sides: the workers along each side: ``(8,)`` is a ring of 8. A grid without wires
        around it, like a v5e's 2 x 4, is the ring through all of its workers.
      port: the bytes per second of a port, in one direction.
      latency: the seconds of a message without bytes.

    Raises:
      ValueError: a number is out of its range, or there are less than two workers.

    Example:
      >>> slice_of_v5e = Link.torus((8,), port=4.5e10, latency=1e-6)
      >>> f"{slice_of_v5e.bytes_per_second:.0e}"
      '9e+10'
    """
    each = [count("sides", side) for side in sides]
    workers, longest = math.prod(each), max(each, default=1)
    if workers < 2:
      raise ValueError(f"`sides` must have at least two workers, got {sides!r}.")
    ports = 2 * sum(side > 1 for side in each)
    load = longest**2 // 4 / (2 * longest) * ports * workers / (workers - 1)
    factor = {("all_to_all", workers): load, ("ppermute", workers): float(ports)}
    rate = ports * above_0("port", port)
    return cls(latency=latency, bytes_per_second=rate, factor=factor)

  @classmethod
  def measure(
    cls,
    mesh: Mesh,
    *,
    axis_name: str | tuple[str, ...] | None = None,
    sizes: Sequence[int] = _SIZES,
    repeats: int = 2,
    progress: bool = True,
  ) -> "Link":
    """Returns the measured link of a mesh's devices, the same in all processes.

    In a few seconds, it times the collectives that gradcomp calls, and swaps between
    pairs of workers if they are even in number and on one axis, and fits ``a + b
    bytes`` to each by the least squares of relative errors. The rate is the fastest
    collective's, and the latency is the median over all.

    Args:
      mesh: the mesh. All processes with devices in it must call this at the same time.
      axis_name: the axes of the workers; by default all of the mesh.
      sizes: the bytes that a worker sends, at least two different ones. All together
        take about ``6 repeats sum(sizes) / rate`` seconds, 7 at 1 Gbit/s.
      repeats: the number of times that each size is sent; the median counts.
      progress: whether the first process prints a line for each collective.

    Raises:
      ValueError: there are less than two workers, or two sizes, or no repeat.
    """
    # All processes run the same collectives in the same order, whatever they measure.
    names = axis_names(mesh.axis_names if axis_name is None else axis_name)
    workers = math.prod(mesh.shape[name] for name in names)
    if workers < 2:
      raise ValueError(
        f"`mesh` must have 2 workers or more over {names}, got {workers}."
      )
    if not isinstance(sizes, Sequence):
      raise ValueError(f"`sizes` must be several numbers of bytes, got {sizes!r}.")
    sizes = sorted({count("sizes", size) for size in sizes})
    if len(sizes) < 2:
      raise ValueError(f"`sizes` must hold two different ones or more, got {sizes}.")
    count("repeats", repeats)
    over = names if len(names) > 1 else names[0]
    given: Any = {"mesh": mesh, "in_specs": P(names), "check_vma": False}

    def spread(value: float, count: int, *rest: int) -> jax.Array:
      whole = np.broadcast_to(np.float32(value), (workers * count, *rest))
      return put(whole, NamedSharding(mesh, P(names)))

    largest = lambda x: collectives.largest(x, over)
    slowest = jax.jit(jax.shard_map(largest, out_specs=P(), **given))
    meet = lambda seconds: float(slowest(spread(seconds, 1))[0])
    latencies, bytes_of = [], dict[tuple[str, int], float]()
    for kind, group, rounds, rows, sent, call in measure.cases(over, workers):
      flat = lambda x, call=call: call(x).reshape(-1)
      run = jax.jit(jax.shard_map(flat, out_specs=P(names), **given))
      points: list[tuple[float, float]] = []
      for size in sizes:
        share = sent * rows * 4  # bytes, for a word of each line
        words = collectives.form(math.ceil(size / share))  # as exchanges send it
        x = spread(1, rows, *words)
        send = run.lower(x).compile()
        if not points:
          jax.block_until_ready(send(x))  # makes the connections
        seconds = measure.median(functools.partial(send, x), repeats, meet)
        points.append((float(share * math.prod(words)), seconds))
      start, byte = measure.line(points)
      latencies.append(start / rounds)
      bytes_of[kind, group] = byte
      if progress and jax.process_index() == 0:
        found = f"{1e6 * start:,.0f} us and {8e-9 / byte:,.3f} Gbit/s"
        print(f"{kind}, {group} workers: {found}", file=sys.stderr, flush=True)
    fastest = min(bytes_of.values())
    return cls(
      latency=statistics.median(latencies),
      bytes_per_second=1 / fastest,
      factor={where: byte / fastest for where, byte in bytes_of.items()},
    )


def collective_seconds(  # noqa: PLR0913 - options, by keyword
  collective: CollectiveName,
  nbytes: float,
  workers: float,
  link: Link,
  *,
  algorithm: Literal["ring", "recursive"] = "ring",
  add: float = 0.0,
  messages: float = 1,
) -> float:
  """Returns the seconds of a collective of p workers with equal links.

  With x for the seconds of ``nbytes`` on the link:

  ==================  =================================================================
  collective          seconds, and what is done in them
  ==================  =================================================================
  ``all_gather``      ``(p-1) (latency + x)``: all get the ``nbytes`` of each
  ``all_to_all``      ``(p-1) latency + (p-1)/p x``: each sends a p-th of its ``nbytes``
                      to each
  ``reduce_scatter``  ``(p-1) latency + (p-1)/p (x + add)``: each gets the sum of a p-th
  ``all_reduce``      ``2 (p-1) latency + (p-1)/p (2 x + add)``: a reduce-scatter, and
                      an all-gather of p-ths
  ``ppermute``        ``messages (latency + x)``, or 0 for a single worker. Through a
                      switch, a worker that sends to p-1 others has p-1 messages
                      (Dettmers 2016).
  ``tree``            ``lg(p) (latency + x)``: a binary tree adds up, or broadcasts (Wen
                      et al. 2017, appendix B). p need not be a power of two.
  ==================  =================================================================

  Recursive algorithms of the first four have ``lg(p)`` latencies in place of ``p-1``.

  Args:
    collective, nbytes: its name, and the bytes that a worker puts in, or in a message.
    workers: p, an integer but for trees.
    link: the link of each worker.
    algorithm: ``"ring"``, or ``"recursive"``, which needs a power of two workers.
    add: the seconds in which a worker adds two arrays of ``nbytes``.
    messages: the number of messages in a row.

  Raises:
    ValueError: a number is below 0, p below 1, or the algorithm does not fit p.
    TypeError: ``link`` is none.
  """
  checks.one_of("collective", CollectiveName, collective)
  checks.instance_of("link", Link, link)
  checks.one_of("algorithm", Literal["ring", "recursive"], algorithm)
  if collective != "tree":
    workers = count("workers", workers)
  elif not at_least_0("workers", workers) >= 1:
    raise ValueError(f"`workers` must be at least 1, got {workers!r}.")
  seconds = at_least_0("nbytes", nbytes) * link.byte_seconds(collective, int(workers))
  add, messages = at_least_0("add", add), at_least_0("messages", messages)
  rounds, share, levels = workers - 1, (workers - 1) / workers, math.log2(workers)
  if algorithm == "recursive" and collective not in ("ppermute", "tree"):
    if int(workers) & (int(workers) - 1):
      raise ValueError(
        f'`workers` must be a power of two for algorithm="recursive", got {workers}.'
      )
    rounds = levels
  hops = messages if workers > 1 else 0
  latencies, taken = {
    "all_gather": (rounds, (workers - 1) * seconds),
    "all_to_all": (rounds, share * seconds),
    "reduce_scatter": (rounds, share * (seconds + add)),
    "all_reduce": (2 * rounds, share * (2 * seconds + add)),
    "ppermute": (hops, hops * seconds),
    "tree": (levels, levels * seconds),
  }[collective]
  return latencies * link.latency + taken


_LINK = checks.Rule(lambda name, x: checks.instance_of(name, Link, x))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodecSpeed(checks.Checked, rules.Kept):
  """The seconds that a codec takes for an element of a leaf.

  Attributes:
    encode: to encode it.
    decode: to decode it, and write it.
    add: to decode it from the payload of one worker, and add it to a sum.
    keep: to add a residual, and to compute the new one, in addition to ``encode``.

  Raises:
    ValueError: one of them is below 0, or not finite.
  """

  encode: float = checks.field(..., rules.SECONDS)
  decode: float = checks.field(..., rules.SECONDS)
  add: float = checks.field(..., rules.SECONDS)
  keep: float = checks.field(0.0, rules.SECONDS)

  @classmethod
  def measure(
    cls, codec: LeafCodec, elements: int = 1 << 24, *, repeats: int = 5
  ) -> "CodecSpeed":
    """Returns the measured speed of a codec on this process's first device, in 5 s.

    All cores of a CPU work for it: see :meth:`times` for processes that share them.

    Args:
      elements: of a matrix of normal numbers, which is encoded, in whole rows.
      repeats: the number of times, for a median.

    Raises:
      ValueError: a number is below 1.
    """
    count("elements", elements)
    count("repeats", repeats)
    width = 1 << (elements.bit_length() // 2)
    shape = (-(-elements // width), width)
    x, key = jax.random.normal(jax.random.key(0), shape), jnp.array([1, 2], jnp.uint32)
    leaf = Leaf(shape, addends=_PAYLOADS)
    bound: Any = codec.bind(leaf)
    context = Context(key, memory=bound.init(leaf, key), step=jnp.int32(0))
    encode = jax.jit(lambda x: payload_of(bound, x, context))
    decode = jax.jit(lambda payload: bound.decode(payload, like=x))

    @jax.jit
    def mean(payload: Any, received: jax.Array) -> jax.Array:
      rows, agreed = payload.rows.shape[0], payload.agreed
      if agreed is not None:
        agreed = jnp.broadcast_to(agreed, (rows, agreed.shape[1]))
      return bound.sums.gathered(received, agreed, 1 / _PAYLOADS)(0, rows)

    payload = encode(x)
    received = jnp.stack([payload.rows] * _PAYLOADS)
    calls = [
      lambda: encode(x),
      lambda: decode(payload),
      lambda: mean(payload, received),
    ]
    medians = []
    for call in (*calls, *measure.updates(codec, shape)):
      jax.block_until_ready(call())  # compiles it
      medians.append(measure.median(call, repeats) / math.prod(shape))
    encoded, decoded, added, forget, keep = medians
    added, kept = added / _PAYLOADS, max(0.0, keep - forget)
    return cls(encode=encoded, decode=decoded, add=added, keep=kept)

  def times(self, factor: float) -> "CodecSpeed":
    """Returns the seconds of one of ``factor`` processes that share the cores."""
    factor = above_0("factor", factor)
    return CodecSpeed(**{name: factor * x for name, x in vars(self).items()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster(checks.Checked):
  """Workers that exchange gradients, with one kind of link for all of them.

  Attributes:
    workers: N.
    link: the link of each worker.
    inside: a faster link between the workers of a group; None if all take ``link``.
    group_size: the number of consecutive workers in a group; None without ``inside``.
    add: the seconds of one addition of two elements.

  Raises:
    ValueError: a number is out of its range, or the groups do not fit the workers.
    TypeError: a link is none.
  """

  workers: int = checks.field(..., rules.COUNT)
  link: Link = checks.field(..., _LINK)
  inside: Link | None = checks.field(None, checks.optional(_LINK))
  group_size: int | None = checks.field(None, checks.optional(rules.COUNT))
  add: float = checks.field(0.0, rules.SECONDS)

  def __post_init__(self) -> None:
    super().__post_init__()
    if (self.inside is None) != (self.group_size is None):
      raise ValueError(
        "`group_size` must be given with `inside`, and only then, got "
        f"group_size={self.group_size!r} and inside={self.inside!r}."
      )
    if self.workers % (self.group_size or 1):
      raise ValueError(
        f"`group_size` must divide the {self.workers} workers, got {self.group_size}."
      )

  def link_within(self, span: int) -> Link:
    """Returns the link of traffic within rows of ``span`` consecutive workers."""
    # Traffic that leaves a group at all is timed as if all of it took the slow link.
    if self.inside is None or self.group_size is None or self.group_size % span:
      return self.link
    return self.inside
