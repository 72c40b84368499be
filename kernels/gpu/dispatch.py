"""Dispatch: chooses the implementation of each operation; no other file does."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
from jax import Array
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from gradcomp._src import checks
from gradcomp._src.kernels.gpu import table, tiles
from gradcomp._src.kernels.tpu import lines

Implementation = Literal["xla", "pallas", "pallas_interpret"]
RULE = checks.choice(Implementation, none=True)

_Function = Callable[..., Any]
_Named = tuple[tuple[str, _Function], ...]  # kernels, by their platforms
# Kernels by platform; a sentence says why there is none, and is an error for a name.
_Kernels = Mapping[str, _Function | str]
NO_KERNEL = "there is no such kernel for this operation"


def encoder(
  name: str,
  reference: _Function,
  on_gpu: _Function,
  on_tpu: _Function | None = None,
  refusal: Callable[[int, Any], str] = tiles.refusal,
) -> _Function:
  """Returns an encoder that chooses one of these functions."""

  def encode_rows(
    x: Array,
    *operands: tiles.Operand,
    form: tiles.Form,
    implementation: Implementation | None = None,
  ) -> tiles.Encoded:
    own = getattr(form, "name", name)
    if operands and (scale := operands[0]) is not None:  # the time depends on them
      own += ", scales" if scale.ndim > 1 and scale.shape[1] > 1 else ", one scale"
    by_lines = lines.refusal(x.size, form) or on_tpu if on_tpu else NO_KERNEL
    kernels = {"cuda": refusal(x.size, form) or on_gpu, "tpu": by_lines}
    given: Any = own, reference, kernels, x, *operands
    return run(*given, form=form, implementation=implementation)

  return encode_rows


def run(
  name: str,
  reference: _Function,
  kernels: _Kernels,
  *operands: Any,
  implementation: Implementation | None = None,
  **options: Any,
) -> Any:
  """Calls one implementation with the operands, and returns its result."""
  # None takes a kernel where the table of a program's devices has its name. `"pallas"`
  # takes it on any device that can run it, and `"pallas_interpret"` is for tests on any
  # backend. Options are static, and hashable.
  xla, platform = _jitted(reference, **options), "cuda"
  able = {
    place: functools.partial(kernel, **options)
    for place, kernel in kernels.items()
    if not isinstance(kernel, str)
  }
  if implementation not in (None, "xla"):
    platform = "tpu" if jax.default_backend() == "tpu" else platform
    if isinstance(no := kernels.get(platform), str):
      raise ValueError(
        f'`implementation` must be None or "xla" here, got {implementation!r}: {no}.'
      )
    if no is None:
      implementation = None

  def by_table(platform: str) -> _Function:
    """Returns a function that takes a kernel or XLA's code, as a program is lowered."""
    # It may be traced before JAX has looked for devices.
    kernel = able[platform]
    size = max(x.size for x in jax.tree.leaves(operands))
    serves = lambda: table.serves(platform, name, size)
    table.require_right(kernel, reference, operands, platform, serves)
    return lambda *given: (kernel if serves() else xla)(*given)

  if implementation is None and able:
    found = {_MOSAIC if x == "tpu" else x: by_table(x) for x in able}
    return by_platform(operands, found, xla.trace(*operands))
  if implementation in (None, "xla"):
    return xla(*operands)
  kernel = able[platform]
  if implementation == "pallas_interpret":
    return kernel(*operands, interpret=True)
  if missing := _missing():
    raise ValueError(
      f"`implementation` must be one that runs here, got {implementation!r}, which "
      f'needs {missing}; use None, which takes the fastest, or "xla".'
    )
  table.require_right(kernel, reference, operands, platform)
  return kernel(*operands)


def _missing() -> str | None:
  """Names the device that kernels need and this machine lacks; None if they run."""
  backend = jax.default_backend()
  if backend not in ("gpu", "tpu"):
    return f"a GPU, and the default backend is {backend!r}"
  if old := table.older_than(table.HOPPER):
    return f"compute capability {table.HOPPER} or more, and this GPU has {old}"
  return None


@functools.lru_cache(1024)
def _jitted(function: _Function, **options: Any) -> Any:
  """Returns one jitted function for equal options, which JAX traces once a shape."""
  return jax.jit(functools.partial(function, **options))


# The primitive traces a kernel only where a program is lowered for its platform.
# `jax.lax.platform_dependent` would import Pallas everywhere.
_CALL = Primitive("gradcomp_kernel")
_CALL.multiple_results = True
_CALL.def_abstract_eval(lambda *_, kernels, reference: reference.out_avals)

# A kernel by Mosaic for TPUs, which XLA cannot partition, and JAX refuses to where it
# would have to. Any other function for TPUs has the name of the platform.
_MOSAIC = "tpu_mosaic"


def by_platform(operands: Any, kernels: Mapping[str, _Function], traced: Any) -> Any:
  """Calls the kernel of the platform of a program, if any, else a traced reference."""
  leaves, structure = jax.tree.flatten(operands)

  def flat(kernel: _Function, *leaves: Any) -> list[Any]:
    return jax.tree.leaves(kernel(*jax.tree.unflatten(structure, leaves)))

  named = tuple([(name, functools.partial(flat, x)) for name, x in kernels.items()])
  found = _CALL.bind(*leaves, kernels=named, reference=traced.jaxpr)
  return jax.tree.unflatten(jax.tree.structure(traced.out_info), found)


def on_tpu(form: _Function) -> Callable[[_Function], _Function]:
  """Decorates a function of arrays; programs for TPUs compute it by ``form``."""
  # Both give the same bits. The form suits TPUs, which keep arrays in tiles of 8 rows
  # by 128 columns. It is traced only where a program is lowered so.

  def decorate(function: _Function) -> _Function:
    @functools.wraps(function)
    def either(*operands: Any, **options: Any) -> Any:
      traced = _jitted(function, **options).trace(*operands)
      return by_platform(operands, {"tpu": functools.partial(form, **options)}, traced)

    return either

  return decorate


def with_kernel(function: _Function, kernel: _Function) -> _Function:
  """Returns a function of arrays that TPUs compute by a kernel of the table."""
  # Encoders may have a kernel by a name where this function has none.
  name = f"{function.__module__.partition('kernels.')[2]}.{function.__name__}"
  return functools.partial(run, name, function, {"tpu": kernel})


@_CALL.def_impl
def _run(*leaves: Any, kernels: _Named, reference: ClosedJaxpr) -> Any:
  named = {name: kernel for name, kernel in kernels if name != _MOSAIC}
  numbers = {name: (lambda k=k: k) for k, name in enumerate(named)}
  number = jax.lax.platform_dependent(**numbers, default=lambda: len(numbers))
  return [*named.values(), _program(reference)][number](*leaves)


def _batched(
  leaves: Any, axes: Any, *, kernels: _Named, reference: ClosedJaxpr
) -> tuple[Any, list[int]]:
  # To name a partial function, JAX would print the whole program that it holds.
  run = functools.wraps(jaxpr_as_fun)(lambda *x: jaxpr_as_fun(reference)(*x))
  mapped = {name: jax.vmap(kernel, axes) for name, kernel in kernels}
  found = by_platform(leaves, mapped, jax.jit(jax.vmap(run, axes)).trace(*leaves))
  return found, [0] * len(found)


@functools.lru_cache(maxsize=1024)
def _program(reference: ClosedJaxpr) -> _Function:
  """Returns a function that a program holds once, whatever number of leaves call it."""
  return jax.jit(jaxpr_as_fun(reference))


def _lower(name: str, ctx: Any, *leaves: Any, kernels: _Named, reference: Any) -> Any:
  named = dict(kernels)
  kernel = named.get(name) or _program(reference)
  if name == "tpu" and _MOSAIC in named:
    # XLA partitions a program, or this part of it, over several devices, unless all
    # axes of its mesh are manual.
    context = ctx.module_context.axis_context
    if (mesh := getattr(context, "mesh", None)) is None:
      alone = getattr(context, "num_devices", None) == 1
    else:
      alone = {*context.manual_axes, *mesh.manual_axes} == {*mesh.axis_names}
    kernel = named[_MOSAIC] if alone else kernel
  return mlir.lower_fun(kernel)(ctx, *leaves)


batching.primitive_batchers[_CALL] = _batched
mlir.register_lowering(_CALL, functools.partial(_lower, ""))
for _name in ("cuda", "tpu"):
  mlir.register_lowering(_CALL, functools.partial(_lower, _name), platform=_name)
