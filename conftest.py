"""Eight CPU devices for the tests, and the names that every doctest may use."""

import importlib
import os
import pkgutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import gradcomp

jax.config.update("jax_num_cpu_devices", 8)
if not jax.config.jax_platforms:  # JAX_PLATFORMS=cuda,cpu for the tests that need a GPU
  jax.config.update("jax_platforms", "cpu")

# pytest names modules after folders, and kernels/ is installed as gradcomp.kernels:
# both names shall mean one module, or the doctests would test a second copy of it.
sys.modules["kernels"] = gradcomp.kernels
for _info in pkgutil.walk_packages(gradcomp.kernels.__path__, "gradcomp.kernels."):
  _module = importlib.import_module(_info.name)
  sys.modules[_info.name.removeprefix("gradcomp.")] = _module


def pytest_report_header() -> str:
  return f"jax {jax.__version__}, numpy {np.__version__}, optax {optax.__version__}"


def pytest_addoption(parser: pytest.Parser) -> None:
  parser.addoption(
    "--every-mode",
    action="store_true",
    help="run the law of the exchanges in every mode for every number of workers, and "
    "packing for every size",
  )
  parser.addoption(
    "--unoptimized",
    action="store_true",
    help="leave LLVM's optimizations out, which saves a quarter of the time; the HLO "
    "that is compiled is the same",
  )


def pytest_configure(config: pytest.Config) -> None:
  """Flags are read when the first device is asked for; processes that tests start
  inherit them, so that their bits are the same."""
  if config.getoption("--unoptimized"):
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0".strip()


@pytest.fixture(autouse=True, scope="session")
def names_in_doctests(doctest_namespace):
  doctest_namespace.update(jax=jax, jnp=jnp, np=np, optax=optax, gradcomp=gradcomp, P=P)
