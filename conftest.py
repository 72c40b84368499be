"""Eight CPU devices for the tests, and the names that every doctest may use."""

import gc
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import gradcomp

pytest_plugins = "tests.plugins.costs", "tests.plugins.selected"
jax.config.update("jax_num_cpu_devices", 8)
if not jax.config.jax_platforms:  # JAX_PLATFORMS=cuda,cpu for the tests that need a GPU
  jax.config.update("jax_platforms", "cpu")

# Workers of one run, processes that tests start, and later runs share what is compiled.
# `make clean` removes it.
if sys.prefix != sys.base_prefix:
  folder = os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{sys.prefix}/xla-cache")
  os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
  jax.config.update("jax_compilation_cache_dir", folder)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def pytest_report_header() -> str:
  return f"jax {jax.__version__}, numpy {np.__version__}, optax {optax.__version__}"


def pytest_collection_finish() -> None:
  """What has been imported stays; the collector need not walk over it each time."""
  gc.collect()
  gc.freeze()
  gc.disable()


@pytest.fixture(autouse=True, scope="module")
def forgotten_programs(request):
  """Lets go of the millions of objects that JAX has kept of a file's programs.

  Workers would grow by gigabytes. Files of doctests compile little.
  """
  yield
  if request.path.is_relative_to(request.config.rootpath / "tests"):
    jax.clear_caches()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def names_in_doctests(doctest_namespace):
  doctest_namespace.update(jax=jax, jnp=jnp, np=np, optax=optax, gradcomp=gradcomp, P=P)
