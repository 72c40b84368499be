"""Holds cases of `tests/table/settings.py` to laws, and encodes and decodes leaves."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import gradcomp
from gradcomp._src.codecs.protocol import payload_of
from gradcomp._src.codecs.sums.records import NOTHING
from gradcomp._src.testing.kit import KEY as KEY
from gradcomp._src.testing.kit import gaussian as gaussian
from gradcomp._src.testing.kit import trial
from gradcomp.codecs import Context, Leaf, Memory
from gradcomp.testing import laws
from tests.support import modes
from tests.table.settings import CASES, LOW_RANK

CODECS = [case.codec for case in CASES]


def name(codec):
  """The id of a codec in tests: its type, and the fields that are not the defaults."""
  fields = dataclasses.fields(codec)
  values = {field.name: getattr(codec, field.name) for field in fields}
  told = [
    _told(values[field.name], field.name)
    for field in fields
    if values[field.name] != field.default
    or ("bucket_size" in values and field.name in ("bits", "bucket_size"))
  ]
  return "-".join([type(codec).__name__.lower(), *told])


def _told(value, field):
  if isinstance(value, bool):
    return field if value else f"no_{field}"
  return str(value) if isinstance(value, str | int | float | None) else value.name


SETTINGS = {name(case.codec): case for case in CASES + LOW_RANK}


def encode(codec, x, key, levels=None):
  """The payload of a leaf; under the first levels where levels are fitted."""
  if levels is None:
    levels = codec.init(Leaf(x.shape), KEY).shared
  bound = codec.bind(Leaf(x.shape))
  return payload_of(bound, x, Context(key, memory=Memory(levels)))


def encoded(codec, x, context=NOTHING):
  """The rows and the residual of a leaf, if its encoder computes one."""
  bound = codec.bind(Leaf(x.shape))
  return bound.encode_leaf(x.astype(jnp.float32), context, keep=True)


def encoded_rows(codec, tiles):
  """The rows of tiles, as of a mean."""
  return jax.jit(codec.encode_rows)(tiles, Context(KEY))


def here(codec):
  """The codec whose ``implementation`` is the one that None takes on CPUs.

  None would trace the kernels for GPUs too, which takes longer than all else.
  """
  if getattr(codec, "implementation", "") is None:
    return dataclasses.replace(codec, implementation="xla")
  return codec


@functools.cache
def _stated(kind):
  return type(kind.__name__, (kind,), {"contraction": 0.5})


def kept(codec):
  """The codec, with a contraction: its residual would grow, but its sums are tried."""
  if codec.contraction > 0:
    return codec
  fields = {x.name: getattr(codec, x.name) for x in dataclasses.fields(codec)}
  return _stated(type(codec))(**fields)


def compressed(codec, exchange, feedback=None, **options):
  """A transformation over the axis "data"; with feedback of a codec that is kept."""
  codec = kept(codec) if feedback else codec
  given = {"exchange": modes.grouped(exchange), "feedback": feedback} | options
  return gradcomp.compress(codec, axis_name="data", **given)


@functools.cache
def encoder(codec):
  return jax.jit(functools.partial(encode, here(codec)))


@functools.cache
def decoder(codec, shape, dtype=jnp.float32):
  like = jax.ShapeDtypeStruct(shape, dtype)
  return jax.jit(lambda payload: codec.decode(payload, like=like))


@functools.partial(jax.jit, static_argnums=0)
def _returned(codec, x, key):
  return codec.decode(encode(codec, x, key), like=x)


def round_trip(codec, x, key=KEY):
  return np.asarray(_returned(here(codec), jnp.asarray(x), key))


def tree(shapes, *lead, seed=0):
  """Gaussian numbers by the names of shapes, ``[*lead, ...]`` each."""
  normal = np.random.default_rng(seed).standard_normal
  return {name: np.float32(normal((*lead, *x))) for name, x in shapes.items()}


def mean_bound(count):
  """The relative error of a mean of one sign: each addition and the division round."""
  return (count + 1) * 2.0**-24


def obeys(case, x):
  """Tries the laws that compile no more than one program of a codec, one of batches."""
  codec = here(case.codec)
  laws.is_a_value(case.codec)
  laws.facts_are_plain(case.codec)
  for law in (
    laws.payload_is_rows_of_words,
    laws.rows_stand_alone,
    laws.zeros_decode_to_zeros,
    laws.tiny_numbers_stay_finite,
    laws.key_decides_the_bits,
    laws.batches_are_independent,
    laws.sent_and_unsent_are_the_leaf,
  ):
    law(codec, x)
  for bad in (np.nan, np.inf, -np.inf):
    laws.non_finite_elements_are_seen(
      codec, x, bad, spoils=case.spoils, unclipped=case.unclipped
    )


def the_page_has_the_payload(case, x):
  """The page alone writes the same rows, and reads the same values of them."""
  found = trial(here(case.codec), x)
  rows, stats = found.payload
  if case.write is not None:
    np.testing.assert_array_equal(rows, case.write(x, KEY, rows, stats))
  expected = case.read(rows, stats, x.shape).reshape(x.shape)
  np.testing.assert_array_equal(found.value, expected)
