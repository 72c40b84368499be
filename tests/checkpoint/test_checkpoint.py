"""Trainings go on to the same bits: through Orbax, and from a file of the past."""

import json

import optax
import pytest

import gradcomp
from gradcomp._src.checkpoint import records
from gradcomp.codecs import QSGD
from gradcomp.parallel import zero
from tests.plugins.slow_cases import slow
from tests.support import saved, saved_format
from tests.support.cases.zero import gradients

QSGD4 = QSGD(bits=4, bucket_size=32)
LEVELS = QSGD(bits=4, bucket_size=32, levels="nonuniform")
FEW_BITS = gradcomp.ErrorFeedback(residual_dtype="int8")
OPTIONS = {"axis_name": "data", "min_leaf_size": 10}


def redsync(density, **options):
  return gradcomp.redsync(density, **({"exchange": "all_gather"} | OPTIONS | options))


def collected(*inner):
  return optax.MultiSteps(optax.chain(*inner), 3).gradient_transformation()


OWNERS = gradcomp.compress(
  QSGD4, exchange="two_shot", feedback="momentum", message_bytes=600, **OPTIONS
)
SWITCH = gradcomp.wrappers.switch([3], [redsync(1.0), redsync(0.1, quantize="asq")])
SHARES = zero(optax.adam(0.1), grads=QSGD4, params=QSGD4, axis_name="data")
ROUNDS = {"every": 4, "codec": QSGD4, "fragments": 2, "delay": 1}
OUTER = optax.sgd(0.7, 0.9, nesterov=True)
LOCAL = gradcomp.local.local_steps(optax.adam(0.1), OUTER, **ROUNDS, **OPTIONS)
# What each kind of state has that those of the table have not, and a place to save it
# in. Two steps are taken: the third is the last before the switch, and of collected
# gradients.
KEPT = {
  "owners": (OWNERS, "shard_map"),
  "switch": (SWITCH, "vmap"),
  "factors": (gradcomp.powersgd(2, min_rate=1, **OPTIONS), "vmap"),
  "few bits": (gradcomp.compress(LEVELS, feedback=FEW_BITS, **OPTIONS), "auto"),
  "thresholds": (redsync(0.1, selection="sampled"), "pmap"),
  "shares": (SHARES, "auto"),
  "round": (LOCAL, "explicit"),
  "guard": (gradcomp.skip_nonfinite(OWNERS, 2, axis_name="data"), "shard_map"),
  "behind": (optax.chain(OWNERS, collected(optax.sgd(0.1))), "explicit"),
  "around": (collected(OWNERS, optax.sgd(0.1)), "pmap"),
}
FAST = ["owners", "switch", "factors", "few bits", "shares", "round"]


@pytest.mark.parametrize("kind", [*FAST, *slow(*(x for x in KEPT if x not in FAST))])
def test_what_a_state_keeps_is_all_that_a_training_needs(kind, tmp_path):
  tx, mode = KEPT[kind]
  if kind not in ("behind", "around"):
    tx = optax.chain(tx, optax.sgd(0.1, momentum=0.9))
  compressed_and_dense = gradients(4, {"w": (9, 70), "b": (3,)})
  saved.assert_goes_on(mode, tx, compressed_and_dense, tmp_path)


def test_a_saved_state_goes_on(request):
  """If this fails, a saved state would go on with other bits.

  Then write the file anew by ``python -m tests.support.saved_format``; from the first
  release on raise records.FORMAT before.
  """
  file = saved_format.load(saved_format.FOLDER / f"format-{records.FORMAT}.npz")
  made = json.loads(str(file["record"]))
  gradcomp.checkpoint.check_record(made, saved_format.record())
  if request.config.getoption("--optimize"):
    pytest.skip("the hash is that of programs that contract no floats")
  assert saved_format.goes_on(file) == str(file["goes_on"])
