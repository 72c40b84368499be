"""Eight CPU devices for the tests, and the names that every doctest may use."""

import gc
import importlib
import os
import pkgutil
import sys
from pathlib import Path

# Tests compile far longer than they compute, so LLVM optimizes only those marked
# `bits`. Processes that tests start inherit it, so that their bits are the same.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import costs
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

# What the workers of a run and later runs have compiled. `make clean` removes it.
if sys.prefix != sys.base_prefix:
  os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{sys.prefix}/xla-cache")
  os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
  jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

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
  parser.addoption("--unoptimized", action="store_true")


def pytest_configure(config: pytest.Config) -> None:
  config.pluginmanager.register(costs.Costs(), "costs")


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
  found = config.pluginmanager.get_plugin("costs")
  terminalreporter.section("what was compiled")
  for line in found.table():
    terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def frozen_garbage():
  yield
  gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def names_in_doctests(doctest_namespace):
  doctest_namespace.update(jax=jax, jnp=jnp, np=np, optax=optax, gradcomp=gradcomp, P=P)
