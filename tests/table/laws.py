"""The laws of the table: the kit's, and those that know the settings of the suite.

Each reads the arrays of a run. A law of the suite returns False, and one of the kit
finds nothing, where a row has nothing that it speaks of.
"""

import functools
import hashlib
import inspect

import jax
import numpy as np

import gradcomp
from gradcomp._src.exchange.collectives import REPEAT
from gradcomp._src.testing import steps as kit
from gradcomp.testing import laws
from tests.support import laws as suite
from tests.table import oracle
from tests.table import run as table


def spoils_as_the_setting_says(run):
  """Where payloads alone are decoded, a NaN spoils what its codec's page says."""
  spoils = suite.SETTINGS[run.row.setting].spoils
  size = 1 if spoils == "itself" else spoils
  if run.row.exchange != "all_gather" or not isinstance(size, int):
    return False
  hit = np.isnan(np.float32(run.outputs[2]["a"][0])).ravel()
  at = hit.size // 2 // size * size
  assert hit[at : at + size].all()
  assert not np.delete(hit, slice(at, at + size)).any()
  return None


def zeros_stay_zeros(run):
  """In the first step, where nothing waits, a bucket of zeros is one of zeros."""
  spoils = suite.SETTINGS[run.row.setting].spoils
  size = 1 if spoils == "itself" else spoils
  # Signs and votes have no zero.
  if not isinstance(size, int) or size > table.ZEROS or run.row.codec.facts.own_units:
    return False
  first = np.float32(run.outputs[0]["a"]).reshape(run.row.workers, -1)
  assert not first[:, : table.ZEROS // size * size].any()


def bytes_are_explained(run):
  """The kit's law, of the row's own program.

  Beside an axis of the compiler, two devices of a worker send a half each.
  """
  if run.program is None:
    return False
  if run.row.place != "beside":
    laws.bytes_are_explained(run)
    return None
  told = gradcomp.explain(run.transformation, run.params, workers=run.sizes).bytes_sent
  found = gradcomp.wire_report(run.program).collectives
  usual = [c for c in found if REPEAT not in c.scope and c.axis != "model"]
  total, few = sum(c.times * c.bytes_sent for c in usual), len(usual)
  least = told - few
  if not any(c.dtype == "f32" for c in usual):
    # Sums of floats and single numbers are sent by both, and lengths are filled up.
    least, told = told / 2 - few, told / 2 + 15 * few
  assert least <= total <= told + few, (total, told)


def codec_is_used(run):
  """The leaf of several tiles is not sent as it is."""
  codec = dict(zip(run.params, run.planned[0].codecs, strict=True))["a"]
  inside = getattr(codec, "codec", codec)  # of a codec around a codec
  assert type(inside).__name__ == type(run.row.codec).__name__


def specification_agrees(run):
  """Each clean step of ``a`` is the one of NumPy, from the state before it."""
  n, spoken = run.row.workers, False
  for number in (0, 1):
    expected = oracle.step(run, number)
    if expected is None:
      continue
    spoken = True
    after = run.states[number + 1]
    got = run.outputs[number]["a"].reshape(n, -1)
    _agrees(got, np.broadcast_to(expected.mean, got.shape), expected, "the mean")
    if run.row.feedback == "error" and expected.kept is not None:
      kept = np.asarray(after.residual["a"]).reshape(n, -1)
      _agrees(kept, expected.kept, expected, "residuals")
    if expected.owned is not None:
      ((array,),) = after.server_residual.values()
      found = np.asarray(array).reshape(expected.owned.shape)
      _agrees(found, expected.owned, expected, "what owners keep")
  return None if spoken else False


def _agrees(got, expected, step, what):
  if step.exact:
    np.testing.assert_array_equal(got, expected, err_msg=what)
    return
  # Sums in another order: last bits differ, and with them the rounding of a few.
  near = np.isclose(got, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
  assert near.mean() > 0.9, f"{what}: {near.mean():.4f} are near"


def digest(run):
  """The hash of all outputs and states; every NaN is the same."""
  hashed = hashlib.sha256()
  for leaf in jax.tree.leaves(kit.kept(run)):
    array = np.asarray(leaf)
    if array.dtype.kind == "f":
      array = np.where(np.isnan(array), array.dtype.type(np.nan), array)
    hashed.update(array.dtype.str.encode() + array.tobytes())
  return hashed.hexdigest()[:16]


@functools.cache
def hashes():
  return {line.row.anywhere: line.hash for line in table.read()[1]}


def golden_bits(run):
  """A row has the bits that it had, whatever its place."""
  known = hashes().get(run.row.anywhere, "-")
  if known == "-":
    return False
  assert digest(run) == known


def speaks(law, run):
  """Returns True if a law has anything to say of a run."""
  found = inspect.unwrap(law)(run)
  return any(True for _ in found) if inspect.isgenerator(found) else found is not False


LAWS = (
  laws.nothing_is_lost,
  laws.workers_agree,
  laws.non_finite_gradients_are_seen,
  laws.finite_gradients_stay_finite,
  laws.state_is_stable,
  laws.checkpoint_goes_on,
  laws.record_is_its_own,
  laws.resharding_keeps_sums,
  spoils_as_the_setting_says,
  zeros_stay_zeros,
  bytes_are_explained,
  codec_is_used,
  specification_agrees,
  golden_bits,
)
