"""The table of a device says which kernels serve; without one XLA's code does."""

import json
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from benchmarks.gpu import check, served, speed
from gradcomp._src.checks import see
from gradcomp._src.kernels.gpu import dispatch, table
from gradcomp.codecs import QSGD, OneBit
from gradcomp.kernels import kernel_verdicts
from tests.support.lowering import KERNEL

CHECKED, TIMED = (json.loads(x.RESULTS.read_text()) for x in (check, speed))
H100 = TIMED["device"]
CODEC = QSGD(bits=4, bucket_size=64)
X = np.linspace(-1, 1, 1500, dtype=np.float32)
NO_TABLE = r"(?s)\ANo table says which .* on {}: XLA runs the reference instead\..*"
NO_TABLE += r'`implementation="pallas"`.*GRADCOMP_CHECK_KERNELS=1.*`make gpu-check`.*'
NO_TABLE += see("runs-the-reference-instead") + r"\Z"


@pytest.fixture(autouse=True)
def forget():
  table._warn_once.cache_clear()


def here(monkeypatch, *kinds, capability="9.0"):
  """Lets the run have GPUs of these kinds."""
  gpus = [SimpleNamespace(device_kind=x, compute_capability=capability) for x in kinds]
  monkeypatch.setattr(table, "devices", lambda platform: gpus * (platform == "cuda"))


def encoder(codec=CODEC):
  return lambda x: codec.encode(x, key=np.array([123, 456], np.uint32)).rows


def has_kernel(function=None, x=X, platform="cuda"):
  traced = jax.jit(function or encoder()).trace(x)
  return KERNEL in traced.lower(lowering_platforms=(platform,)).as_text()


def test_the_table_is_what_the_records_give():
  """Made by hand it would be an opinion."""
  assert json.loads(served.TABLE.read_text())[H100] == served.lines(CHECKED, TIMED)


def test_no_kernel_serves_that_is_wrong_or_slower_or_not_on_record():
  lines = served.lines(CHECKED, TIMED)["least"]
  assert {"qsgd", "one_bit", "block_top"} <= lines.keys()
  times = {
    (x["case"], x["elements"], x["implementation"]): x["seconds"] for x in TIMED["rows"]
  }
  for (case, size, name), seconds in times.items():
    if case in served.CASES and name == "pallas":
      for kernel in served.kernels(case):
        serves = size >= lines.get(kernel, math.inf)
        assert not serves or seconds <= times[case, size, "xla"], (case, size)
  assert not served.lines(CHECKED | {"right": ["qsgd 4 bit"]}, TIMED)["least"]


def test_a_kernel_serves_from_its_size_on(monkeypatch):
  here(monkeypatch, H100)
  assert has_kernel()
  x = jax.ShapeDtypeStruct((2**24 - 1,), np.float32)
  assert not has_kernel(encoder(OneBit()), x)
  assert has_kernel(encoder(OneBit()), x.update(shape=(2**24,)))
  found = kernel_verdicts()
  assert found["one_bit"] == table.Verdict(1 << 24, found["qsgd"].record)
  assert "JAX 0.11.2, 2026-11-27" in found["qsgd"].record


def test_a_device_that_no_table_knows_takes_xla_and_says_so_once(monkeypatch):
  here(monkeypatch, "NVIDIA H900")
  with pytest.warns(RuntimeWarning, match=NO_TABLE.format("NVIDIA H900")) as caught:
    assert not has_kernel()
    assert not has_kernel(encoder(QSGD(bits=8, bucket_size=64)))
  assert len(caught) == 1
  assert kernel_verdicts() == {}
  monkeypatch.setattr(dispatch, "_missing", lambda: None)
  # A name takes the kernel, whatever a table says.
  forced = encoder(QSGD(bits=4, bucket_size=64, implementation="pallas"))
  assert has_kernel(forced)


def test_devices_of_several_kinds_take_what_all_their_tables_have(monkeypatch):
  """All processes know all kinds, and so take the same."""
  other = {"one_bit": table.Verdict(1 << 25, "b"), "qsgd": table.Verdict(0, "b")}
  both = table._read() | {"other": other}
  monkeypatch.setattr(table, "_read", lambda: both)
  here(monkeypatch, H100, "other")
  assert has_kernel() and kernel_verdicts()["one_bit"] == table.Verdict(1 << 25, "b")
  assert kernel_verdicts()["block_top"] == table.Verdict()
  here(monkeypatch, H100, "NVIDIA H900")
  with pytest.warns(RuntimeWarning, match="on NVIDIA H900: XLA"):
    assert not has_kernel()


def test_a_gpu_older_than_hopper_runs_the_reference_without_a_word(monkeypatch):
  here(monkeypatch, "A100", capability="8.0")
  assert not has_kernel()
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  with pytest.raises(ValueError, match="needs compute capability 9.*this GPU has 8.0"):
    jax.eval_shape(encoder(QSGD(implementation="pallas")), np.ones(4096, np.float32))


def test_a_program_is_lowered_for_the_devices_of_its_mesh(monkeypatch):
  """Which need not be here; and where nobody knows them, XLA's code serves."""
  here(monkeypatch)
  for kind, serves in ((H100, True), ("NVIDIA H900", False)):
    device = AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
      if serves:
        assert has_kernel()
      else:
        with pytest.warns(RuntimeWarning, match=NO_TABLE.format(kind)):
          assert not has_kernel()
  for platform in ("cuda", "tpu"):
    of = f"a device of {platform} that is not here"
    with pytest.warns(RuntimeWarning, match=NO_TABLE.format(of)):
      assert not has_kernel(encoder(OneBit()), np.ones(1 << 17, "f4"), platform)


def test_to_trace_looks_for_no_devices(monkeypatch):
  monkeypatch.setattr(table, "devices", None)
  traced = jax.jit(encoder()).trace(X)
  here(monkeypatch, H100)
  assert KERNEL in traced.lower(lowering_platforms=("cuda",)).as_text()
