"""plan chooses by platform and link, and answers on the command line."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import pytest

import gradcomp
from gradcomp import __main__
from gradcomp._src.cost.planner.candidates import CANDIDATES
from gradcomp._src.cost.planner.choice import _platform
from gradcomp.codecs import QSGD, BlockTop
from gradcomp.cost import CodecSpeed, Link, PlanOptions
from tests.support.cases.cost import FREE
from tests.support.cases.plan import GIGABIT, LIKE, QSGD4, plan


def test_leaves_with_more_rows_than_32_bits_count():
  """Only the codecs that count them are refused; the others are compared."""
  huge = jax.ShapeDtypeStruct((8 * 10**15,), jnp.float32)
  fitted = QSGD(bits=2, levels="nonuniform")
  assert plan(huge).chosen.name == "QSGD-4 two_shot"
  found = plan(huge, candidates=[fitted], budget="aggressive", speeds=FREE)
  assert found.chosen.name == "float32 psum"
  reasons = [x.reason for x in found.refused if x.way == "two_shot"]
  assert "`params` must have leaves of fewer elements" in reasons[0]


def test_a_sparse_codec_of_ones_own_is_gathered():
  """Owners would choose anew among the elements of a sum. Over the internet."""
  speed = CodecSpeed(encode=5e-10, decode=2e-10, add=1e-10, keep=1e-9)
  given = dict(workers=8, link=Link(latency=0.025, bytes_per_second=12.5e6))
  given |= dict(candidates=[BlockTop()], budget="aggressive", speeds=speed)
  found = plan(LIKE, **given)
  assert [x.name for x in found.rows] == ["float32 psum", "BlockTop() all_gather"]
  assert found.verdict.startswith("compress: BlockTop() all_gather ")
  assert found.chosen.error == pytest.approx(0.904, rel=0.01)
  reasons = {x.way: x.reason for x in found.refused}
  for exchange in ("two_shot", "ring", "hierarchical"):
    assert "8 workers together choose up to 0.118" in reasons[exchange]
  assert "waits for about 64 steps" in str(plan(steps=600, **given).refused)


def test_the_command_line_answers(capsys):
  __main__.main([])
  assert "python -m gradcomp plan --params 25M" in capsys.readouterr().out
  words = "plan --params 1e6 --workers 2 --gbit 0.1 --budget tight --slower 2".split()
  __main__.main(words)
  said = capsys.readouterr().out.splitlines()
  assert said[-1].startswith("compress: QSGD-4 all_gather ")
  source = "Codec speeds are packaged ones of two cores (backend 'cpu')."
  assert f"{source} Times 2." in said


INSIDE = Link.torus((8,), port=4.5e10, latency=1e-6)  # of a v5e's slice of 2 x 4
BETWEEN = Link(latency=1e-4, bytes_per_second=25e9 / 8)  # an eighth of its host's cards


def test_tpus_gain_little_inside_of_a_slice():
  """And where slices add up first, it still pays between them."""
  options = dict(candidates=CANDIDATES, speeds="TPU v5e")
  note = "Codec speeds are XLA's estimate for a TPU v5e: nothing was timed."
  ports = dataclasses.replace(INSIDE, bytes_per_second=2 * INSIDE.bytes_per_second)
  for link, least, most in ((ports, 0, 1), (INSIDE, 1, 1.2), (BETWEEN, 4, 8)):
    found = plan(LIKE, workers=8, link=link, **options)
    assert found.verdict.startswith("compress" if most > 1 else "do not")
    assert least < max(x.speedup for x in found.rows[1:]) < most
    assert note in found.notes
  found = plan(LIKE, workers=(2, 4), link=(BETWEEN, INSIDE), **options)
  assert found.verdict.startswith("compress: ")
  assert found.rows[0].exchange.name == found.chosen.exchange.name == "hierarchical"
  assert 1 < found.chosen.speedup < 4  # 8 bits in place of 32


def test_a_device_that_has_packaged_speeds_takes_them(monkeypatch):
  device = collections.namedtuple("Device", "device_kind platform")
  monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
  monkeypatch.setattr(jax, "devices", lambda: [device("TPU v5 lite", "tpu")])
  assert plan().notes[-1].startswith("Codec speeds are XLA's estimate")
  monkeypatch.setattr(jax, "devices", lambda: [device("TPU v4", "tpu")])
  with pytest.raises(ValueError, match="`speeds` must be given on 'tpu': the package"):
    plan()


SIX = {f"w{i}": jax.ShapeDtypeStruct((2**22,), jnp.float32) for i in range(6)}


def messages(**options):
  """Those of QSGD-4, as chosen at 1 Gbit/s, each with 4 MiB."""
  found = plan(SIX, workers=4, budget="tight", **options)
  assert found.chosen.name == "QSGD-4 two_shot"
  return found.explanation.messages


def test_messages_are_those_of_the_platform():
  """A TPU's are 2 MiB a leaf; and what was explained for one is not the other's."""
  assert messages() == 1
  assert messages(speeds="TPU v5e") == 3
  assert messages(speeds="cpu") == 1
  slow = CodecSpeed(encode=1e-10, decode=1e-10, add=1e-10)
  assert messages(speeds=slow, platform="gpu") == 3
  assert messages(speeds="TPU v5e", platform="cpu") == 1
  device = jax.sharding.AbstractDevice("TPU v5 lite", 1, "tpu")
  mesh = jax.sharding.AbstractMesh((4,), ("data",), abstract_device=device)
  with jax.sharding.use_abstract_mesh(mesh):
    assert messages() == 3


def test_a_mesh_that_is_measured_is_of_its_platform(monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
  mesh = jax.make_mesh((4,), ("data",))
  options = PlanOptions(candidates=QSGD4)
  assert _platform(options, mesh) == "cpu"
  assert _platform(options, GIGABIT) == "tpu"


def test_the_command_line_plans_for_the_device(monkeypatch):
  seen, found = [], plan()
  kept = lambda options: (options.platform, options.optimizer)
  record = lambda *args, options, **rest: seen.append(kept(options)) or found
  monkeypatch.setattr(gradcomp.cost, "plan", record)
  words = "plan --params 1e6 --workers 2 --gbit 0.1 --device".split()
  for device in ("cpu", "H100", "TPU v5e"):
    __main__.main([*words, device])
  __main__.main([*words, "cpu", "--optimizer", "adam"])
  assert seen == [("cpu", None), ("gpu", None), ("tpu", None), ("cpu", "adam")]
