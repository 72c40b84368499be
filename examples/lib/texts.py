"""Loads texts to model, and has networks for them.

The files of ``python`` differ a little between versions of Python, so compare
perplexities of one version only. The Brown corpus is a million words of American
English that appeared in 1961; `make data` prepares it. Every tenth of its 500 texts is
for testing, from the first on, so that all fifteen kinds of text are in both parts.
"""

import collections
import functools
import sysconfig
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from examples import lib
from examples.lib import parsing

# Large modules that Python 3.11 to 3.13 all have, each one file of plain Python.
MODULES = tuple(
  "argparse ast configparser dataclasses datetime difflib doctest enum functools "
  "inspect ipaddress mailbox optparse pdb pickle pickletools pydoc shutil statistics "
  "subprocess tarfile threading typing turtle".split()
)
UNKNOWN, END = "<unk>", "<eos>"  # words of Brown
CHARACTERS = 128  # ASCII; the few bytes above it are read as "?"


class Tokens(NamedTuple):
  """Sequences, and the next symbol behind each position."""

  inputs: np.ndarray  # [count, length], of the text's type
  labels: np.ndarray  # int32[count, length]


class Text(NamedTuple):
  train: np.ndarray  # of integers from 0 on
  test: np.ndarray
  symbols: int = CHARACTERS  # that all of them are below


def add_arguments(parser: ArgumentParser) -> None:
  """Adds the options that name a text and the length of its sequences."""
  add = parser.add_argument_group("text").add_argument
  said = "python is on every machine; `make data` prepares brown"
  add("--text", choices=tuple(TEXTS), default="python", help=said)
  add("--length", type=parsing.positive, default=32, help="symbols in a sequence")


def fits(parser: ArgumentParser, args: Namespace, text: Text) -> None:
  """Refuses sequences that are longer than the text."""
  longest = min(len(text.train), len(text.test)) - 1
  if args.length > longest:
    parser.error(f"--length must be at most {longest} for this text, got {args.length}")


def load(name: str = "python", **options: Any) -> Text:
  """Reads one of ``TEXTS``."""
  return TEXTS[name](**options)


def python() -> Text:
  """Reads nine tenths of every module for training, and its last tenth for testing."""
  folder = Path(sysconfig.get_paths()["stdlib"])
  codes = [as_characters((folder / f"{name}.py").read_bytes()) for name in MODULES]
  parts = [np.split(code, [len(code) * 9 // 10]) for code in codes]
  return Text(*map(np.concatenate, zip(*parts, strict=True)))


def brown(data_dir: Path = lib.FOLDER) -> Text:
  """Reads the corpus as bytes, a sentence a line and a space between words."""
  return Text(*(as_characters(x.encode("latin-1")) for x in _texts(data_dir)))


def brown_words(data_dir: Path = lib.FOLDER, symbols: int = 10_000) -> Text:
  """Reads the corpus as numbers of lower-case words: 0 of rare ones, 1 of ends."""
  train, test = (x.replace("\n", f" {END} ").lower().split() for x in _texts(data_dir))
  counts = collections.Counter(train)
  del counts[END]
  known = [UNKNOWN, END, *(word for word, _ in counts.most_common(symbols - 2))]
  numbers = {word: i for i, word in enumerate(known)}
  numbered = lambda part: np.array([numbers.get(x, 0) for x in part], np.int32)
  return Text(numbered(train), numbered(test), symbols)


def _texts(data_dir: Path) -> list[str]:
  """Returns the texts for training as one, and those for testing."""
  import tensorflow_datasets as tfds  # few runs need it, and it takes seconds

  try:
    options = {"data_dir": data_dir, "download": False}
    sources = tfds.data_source("brown", split=["train", "test"], **options)
  except tfds.core.DatasetNotFoundError as error:
    said = "must hold the Brown corpus, got none. `make data` prepares it in datasets/."
    raise FileNotFoundError(f"{data_dir} {said}") from error
  return ["".join(x["text"].decode() for x in source) for source in sources]


TEXTS = {"python": python, "brown": brown, "brown-words": brown_words}


def as_characters(text: bytes) -> np.ndarray:
  """Returns the bytes as numbers below ``CHARACTERS``."""
  code = np.frombuffer(text, np.uint8)
  return np.where(code < CHARACTERS, code, ord("?")).astype(np.uint8)


def sequences(text: np.ndarray, starts: np.ndarray, length: int) -> Tokens:
  """Cuts sequences of ``length`` symbols out of a text, one from each of ``starts``."""
  windows = text[starts[:, None] + np.arange(length + 1)]
  return Tokens(windows[:, :-1], windows[:, 1:].astype(np.int32))


def in_order(text: np.ndarray, length: int, most: int | None = None) -> Tokens:
  """Cuts a text into sequences to test on, and leaves out its last few symbols."""
  starts = np.arange(0, len(text) - length, length)
  if most is not None and len(starts) > most:
    starts = starts[np.arange(most) * len(starts) // most]
  return sequences(text, starts, length)


def batches(
  text: np.ndarray, size: int, length: int, *, seed: int, part: int = 0, parts: int = 1
) -> Iterator[Tokens]:
  """Yields batches without end, of sequences that start anywhere."""
  mine = slice(part * size // parts, (part + 1) * size // parts)
  generator = np.random.default_rng(seed)
  while True:
    starts = generator.integers(len(text) - length, size=size)
    yield sequences(text, starts[mine], length)


TURNING = nnx.initializers.orthogonal()
_norm = functools.partial(linen.LayerNorm, use_bias=False)


def in_blocks(params: Any) -> Any:
  """Labels the stacked blocks of a transformer, and the rest."""
  of_path = lambda path, _: "blocks" if path[0].key == "blocks" else "rest"
  return jax.tree.map_with_path(of_path, params)


class LSTM(nnx.Module):
  """Two layers of long short-term memory. The output layer is the embedding."""

  def __init__(self, symbols: int, *, width=256, layers=2, dropout=0.2, rngs: nnx.Rngs):
    # Small, for logits are products with the embedding.
    small = nnx.initializers.normal(0.05)
    self.embed = nnx.Embed(symbols, width, embedding_init=small, rngs=rngs)
    self.layers = nnx.List([LSTMLayer(width, rngs=rngs) for _ in range(layers)])
    self.dropout = nnx.Dropout(dropout)
    self.bias = nnx.Param(jnp.zeros(symbols))

  def __call__(self, tokens: jax.Array, *, rngs: nnx.Rngs | None = None) -> jax.Array:
    x = self.dropout(self.embed(tokens.astype(jnp.int32)), rngs=rngs)
    for layer in self.layers:
      x = self.dropout(layer(x), rngs=rngs)
    return self.embed.attend(x) + self.bias[...]


class LSTMLayer(nnx.Module):
  """A layer of memory cells. All four gates are one product."""

  def __init__(self, width: int, *, rngs: nnx.Rngs):
    self.inputs = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
    self.recurrent = nnx.Linear(width, 4 * width, kernel_init=TURNING, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    given = self.inputs(x)
    kernel, bias = self.recurrent.kernel[...], self.recurrent.bias[...]

    def step(carry: Any, now: jax.Array) -> tuple[Any, jax.Array]:
      state, cell = carry
      write, keep, read, new = jnp.split(now + state @ kernel + bias, 4, axis=-1)
      # At first a cell keeps most of what it has.
      cell = nnx.sigmoid(keep + 1) * cell + nnx.sigmoid(write) * nnx.tanh(new)
      state = nnx.sigmoid(read) * nnx.tanh(cell)
      return (state, cell), state

    return scanned(step, (zeros(given, kernel.shape[0]),) * 2, given)


def zeros(given: jax.Array, size: int) -> jax.Array:
  """Makes states that differ between workers to jax.shard_map, as later ones do."""
  return 0 * given[:, 0, :size]


def scanned(step: Callable[..., Any], start: Any, given: jax.Array) -> jax.Array:
  """Takes a step for each position of ``given``, along the second axis."""
  _, states = jax.lax.scan(step, start, given.swapaxes(0, 1))
  return states.swapaxes(0, 1)


class Transformer(linen.Module):
  """A decoder whose output layer is the embedding. Positions are angles (Su, 2021)."""

  symbols: int
  width: int = 128  # of each head an even number
  heads: int = 4
  layers: int = 2
  block: type[linen.Module] | None = None  # in place of Block, as fsdp_linen.py has it
  dropout: float = 0.0
  stacked: bool = False  # whether blocks are one loop, over stacked parameters

  @linen.compact
  def __call__(self, tokens: jax.Array, train: bool = False, scan: Any = jax.lax.scan):
    rate = self.dropout if train else 0.0
    block = self.block or functools.partial(Block, dropout=rate)
    embed = linen.Embed(self.symbols, self.width, name="embed")
    x = linen.Dropout(rate, deterministic=False)(embed(tokens.astype(jnp.int32)))
    if self.stacked:
      x = self._scanned(block, x, scan, drops=rate > 0)
    else:
      for i in range(self.layers):
        x = block(self.heads, name=f"block{i}")(x)
    return embed.attend(_norm(name="norm")(x))

  def _scanned(self, block: Any, x: jax.Array, scan: Any, *, drops: bool) -> jax.Array:
    """Applies all blocks in a loop, with a key for the dropout of each."""
    module = block(self.heads, parent=None)

    def init(key: jax.Array) -> Any:
      of_one = lambda key: module.init({"params": key, "dropout": key}, x)["params"]
      return jax.vmap(of_one)(jax.random.split(key, self.layers))

    def layer(x: jax.Array, given: Any) -> tuple[jax.Array, None]:
      params, key = given
      rngs = {} if key is None else {"dropout": key}
      return module.apply({"params": params}, x, rngs=rngs), None

    keys = jax.random.split(self.make_rng("dropout"), self.layers) if drops else None
    return scan(layer, x, (self.param("blocks", init), keys))[0]


class Block(linen.Module):
  """Attention and two dense layers, each normalized before and added to its input."""

  heads: int
  dropout: float = 0.0  # of what is added

  @linen.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    width = x.shape[-1]
    drop = linen.Dropout(self.dropout, deterministic=False)
    dense = lambda size, name: linen.Dense(size, use_bias=False, name=name)
    given = dense(3 * width, "attend")(_norm(name="norm1")(x))
    heads = given.reshape(*x.shape[:2], self.heads, -1)
    query, key, value = jnp.split(heads, 3, axis=-1)
    x += drop(dense(width, "mix")(attention(turned(query), turned(key), value)))
    wide = linen.gelu(dense(4 * width, "widen")(_norm(name="norm2")(x)))
    return x + drop(dense(width, "narrow")(wide))


def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
  """Averages the values of all positions up to each query's own."""
  length, size = query.shape[1], query.shape[-1]
  scores = jnp.einsum("bqhs,bkhs->bhqk", query, key) / size**0.5
  seen = jnp.tril(jnp.ones((length, length), bool))
  weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
  mixed = jnp.einsum("bhqk,bkhs->bqhs", weights, value)
  return mixed.reshape(*mixed.shape[:2], -1)


def turned(x: jax.Array) -> jax.Array:
  """Turns pairs by angles, so that products depend on the distance of positions."""
  length, half = x.shape[1], x.shape[-1] // 2
  rates = 10000.0 ** (-jnp.arange(half) / half)
  angles = (jnp.arange(length)[:, None] * rates)[:, None]  # [length, 1, half]
  a, b = jnp.split(x, 2, axis=-1)
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


NETWORKS = {"lstm": LSTM, "transformer": Transformer}


def network(
  model: Any, symbols: int, dropout: float | None = None, stacked: bool = False
) -> Any:
  """Returns a network of flax linen, or a function from ``rngs`` to one of flax nnx."""
  options: dict[str, Any] = {} if dropout is None else {"dropout": dropout}
  options |= {"stacked": True} if stacked else {}
  make = functools.partial(model, symbols, **options)
  return make() if issubclass(model, linen.Module) else make
