"""Dispatch: chooses the implementation of each operation; no other file does.

A ``reference`` is jnp code, ``pallas`` is a kernel for GPUs, and ``tpu`` one for TPUs,
with the same bits. The primitive of this file traces a kernel only where a program is
lowered for its platform, which ``jax.lax.platform_dependent`` does not: it would import
Pallas everywhere.
"""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
from jax import Array
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from gradcomp._src import checks
from gradcomp._src.kernels.gpu import self_check, tiles

Implementation = Literal["xla", "pallas", "pallas_interpret"]
RULE = checks.choice(Implementation, none=True)

_SEE = checks.see("runs-the-reference-instead")

# Whatever the filters of warnings say, each text once in a process.
_warn_once = functools.cache(warnings.warn)

_Function = Callable[..., Any]
_Named = tuple[tuple[str, _Function], ...]  # kernels, by their platforms


class Operation(NamedTuple):
  """The functions of an operation; a kernel may be why there is none, a sentence."""

  xla: _Function
  pallas: _Function | str
  tpu: _Function | str = "there is no such kernel for this operation"


def encoder(
  reference: Any,
  pallas: Any,
  tpu: Any = None,
  *,
  refusal: Callable[[int, Any], str] = tiles.refusal,
) -> _Function:
  """Returns an encoder that chooses one of the modules' ``encode_rows``."""
  # `refusal` is the reason why no kernel for GPUs can encode so many elements, or "".

  def encode_rows(
    x: Array,
    *operands: tiles.Operand,
    form: tiles.Form,
    implementation: Implementation | None = None,
  ) -> tiles.Encoded:
    functions = Operation(
      reference.encode_rows, refusal(x.size, form) or pallas.encode_rows
    )
    if tpu is not None:
      no = tpu.refusal(x.size, form)
      functions = functions._replace(tpu=no or tpu.encode_rows)
    tile = form.planes * form.bucket_size
    example = lambda size: self_check.few_tiles(size, tile, *operands)
    return run(functions, implementation, (x, *operands), {"form": form}, example)

  return encode_rows


def run(
  operation: Operation,
  implementation: Implementation | None,
  operands: tuple[Any, ...],
  options: dict[str, Any],
  example: Callable[[int], self_check.Example],
) -> Any:
  """Calls one implementation with the operands, and returns its result."""
  # In a process with GPUs or TPUs, `self_check.verdict` first compares a kernel with
  # `"xla"` on a small input. Where the kernel fails or gives other bits, None warns of
  # it once and takes `"xla"`, and the name raises RuntimeError. None also takes `"xla"`
  # where it is faster. All processes of a run do the same. `"pallas_interpret"` is for
  # tests on any backend. None takes `"pallas"` on CUDA devices from Hopper on, and the
  # kernel for TPUs on those, where there is such a kernel, and `"xla"` elsewhere, as a
  # program is lowered. Options are static, and hashable. `example` makes an input of
  # some elements, only where there is a device.
  xla = _jitted(operation.xla, **options)
  if implementation == "xla":
    return xla(*operands)
  reference = functools.partial(operation.xla, **options)
  found, kernels = operation.pallas, dict[str, _Function]()
  if implementation is None:
    if not isinstance(found, str):
      cuda = functools.partial(found, **options)
      if _approved(cuda, reference, example, "cuda"):
        # A program may be traced before JAX has looked for devices, but not lowered.
        able = lambda *given: (xla if self_check.too_old() else cuda)(*given)
        kernels["cuda"] = able
    if not isinstance(operation.tpu, str):
      tpu = functools.partial(operation.tpu, **options)
      if _approved(tpu, reference, example, "tpu"):
        kernels[_MOSAIC] = tpu
    if not kernels:
      return xla(*operands)
    return by_platform(operands, kernels, xla.trace(*operands))
  if isinstance(found, str):
    raise ValueError(
      f'`implementation` must be None or "xla" here, got {implementation!r}: {found}.'
    )
  kernel = functools.partial(found, **options)
  if implementation == "pallas_interpret":
    return kernel(*operands, interpret=True)
  if missing := _missing():
    raise ValueError(
      f"`implementation` must be one that runs here, got {implementation!r}, which "
      f'needs {missing}; use None, which takes the fastest, or "xla".'
    )
  _approved(kernel, reference, example, "cuda", named=True)
  return kernel(*operands)


def _approved(
  kernel: functools.partial[Any],
  reference: _Function,
  example: Callable[[int], self_check.Example],
  platform: str,
  *,
  named: bool = False,
) -> bool:
  """Returns whether programs take a kernel; RuntimeError if one that is named fails."""
  verdict = self_check.verdict(kernel, reference, example, platform)
  if wrong := verdict.failure:
    if named:
      raise RuntimeError(f'{wrong} Use `implementation` None or "xla".{_SEE}')
    _warn_once(f"{wrong} XLA runs the reference instead.{_SEE}", RuntimeWarning)
  return verdict.for_kernel


def _missing() -> str | None:
  """Names the device that kernels need and this machine lacks; None if they run."""
  backend = jax.default_backend()
  if backend != "gpu":
    return f"a GPU, and the default backend is {backend!r}"
  if old := self_check.too_old():
    return f"compute capability {self_check.HOPPER} or more, and this GPU has {old}"
  return None


@functools.lru_cache(1024)
def _jitted(function: _Function, **options: Any) -> Any:
  """Returns one jitted function for equal options, which JAX traces once a shape."""
  return jax.jit(functools.partial(function, **options))


_CALL = Primitive("gradcomp_kernel")
_CALL.multiple_results = True

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


def on_tpu(
  form: _Function, *, mosaic: bool = False
) -> Callable[[_Function], _Function]:
  """Decorates a function of arrays; programs for TPUs compute it by ``form``."""
  # Both give the same bits. The form suits TPUs, which keep arrays in tiles of 8 rows
  # by 128 columns. It is traced only where a program is lowered so. `mosaic` says that
  # it has a kernel, which XLA cannot partition.
  name = _MOSAIC if mosaic else "tpu"

  def decorate(function: _Function) -> _Function:
    @functools.wraps(function)
    def either(
      *operands: Any, implementation: Implementation | None = None, **options: Any
    ) -> Any:
      xla = _jitted(function, **options)
      if implementation == "xla":
        return xla(*operands)
      kernel = functools.partial(form, **options)
      reference = functools.partial(function, **options)
      example = lambda size: self_check.few_rows(size, *operands)
      if mosaic and not _approved(kernel, reference, example, "tpu"):
        return xla(*operands)
      return by_platform(operands, {name: kernel}, xla.trace(*operands))

    return either

  return decorate


@_CALL.def_abstract_eval
def _types(*_: Any, kernels: _Named, reference: ClosedJaxpr) -> list[Any]:
  return reference.out_avals


@_CALL.def_impl
def _run(*leaves: Any, kernels: _Named, reference: ClosedJaxpr) -> Any:
  named = {name: kernel for name, kernel in kernels if name != _MOSAIC}
  functions = [*named.values(), _program(reference)]
  numbers = {name: (lambda k=k: k) for k, name in enumerate(named)}
  number = jax.lax.platform_dependent(**numbers, default=lambda: len(numbers))
  return functions[number](*leaves)


def _batched(
  leaves: Any, axes: Any, *, kernels: _Named, reference: ClosedJaxpr
) -> tuple[Any, list[int]]:
  # To name a partial function, JAX would print the whole program that it holds.
  run = functools.wraps(jaxpr_as_fun)(lambda *x: jaxpr_as_fun(reference)(*x))
  traced = jax.jit(jax.vmap(run, axes)).trace(*leaves)
  mapped = {name: jax.vmap(kernel, axes) for name, kernel in kernels}
  found = by_platform(leaves, mapped, traced)
  return found, [0] * len(found)


@functools.lru_cache(maxsize=1024)
def _program(reference: ClosedJaxpr) -> _Function:
  """Returns a function that a program holds once, whatever number of leaves call it."""
  return jax.jit(jaxpr_as_fun(reference))


def _lower(
  platform: str, ctx: Any, *leaves: Any, kernels: _Named, reference: Any
) -> Any:
  named = dict(kernels)
  kernel = named.get(platform) or _program(reference)
  if platform == "tpu" and not _is_partitioned(ctx.module_context.axis_context):
    kernel = named.get(_MOSAIC, kernel)
  return mlir.lower_fun(kernel)(ctx, *leaves)


def _is_partitioned(context: Any) -> bool:
  """Returns True if XLA partitions a program, or this part of it, over devices."""
  if not hasattr(context, "mesh"):
    return bool(getattr(context, "num_devices", None) != 1)
  manual = set(context.manual_axes) | set(context.mesh.manual_axes)
  return manual != set(context.mesh.axis_names)


batching.primitive_batchers[_CALL] = _batched
mlir.register_lowering(_CALL, functools.partial(_lower, ""))
for _platform in ("cuda", "tpu"):
  mlir.register_lowering(
    _CALL, functools.partial(_lower, _platform), platform=_platform
  )
