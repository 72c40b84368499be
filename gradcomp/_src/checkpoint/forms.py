"""The form of a record, and the errors for values of another form."""

from collections.abc import Mapping
from typing import Any

_ALL = object()  # the key that stands for all keys
_MAY = {"params"}  # a key that a record may lack

# A form is a type, a list with the form of all items, or a dict of keys and forms.
_OPTION = {"type": str}
FIRST = {"format": int, "gradcomp": str}
WHOLE: dict[str, Any] = FIRST | {
  "workers": [int],
  "stacked": bool,
  "platform": str,
  "transformations": [
    {
      "axes": [str],
      "codecs": [_OPTION],
      "leaves": {_ALL: {"shape": [int], "codec": int}},
      "feedback": _OPTION,
      "arrays": [{"exchange": _OPTION, "leaves": [str]}],
      "params": _OPTION,
    }
  ],
}


def check_form(name: str, value: Any, form: Any) -> None:
  """Raises TypeError unless a record has a form, and the codecs that leaves number."""
  wrong = _misfit(value, form, "")
  if wrong is None and form is WHOLE:
    for i, made in enumerate(value["transformations"]):
      for leaf, kept in made["leaves"].items():
        if not 0 <= kept["codec"] < len(made["codecs"]):
          wrong = f"transformation {i} has no codec {kept['codec']}, that of {leaf}"
  if wrong is not None:
    raise TypeError(
      f"`{name}` must be what gradcomp.checkpoint.record returned, but {wrong}; save "
      "it beside the state, or restore the parameters alone and begin with the state "
      "of optimizer.init."
    )


def _misfit(value: Any, form: Any, where: str) -> str | None:
  """Describes the first mismatch of a value and a form; None if there is none."""
  if isinstance(form, dict):
    if not isinstance(value, Mapping):
      return f"{where or 'it'} is {value!r}, and no dict"
    keys = value if _ALL in form else [x for x in form if x in value or x not in _MAY]
    of_key = lambda x: (f"{where}[{x!r}]", value.get(x), form.get(x, form.get(_ALL)))
    parts = [of_key(x) for x in keys]
  elif isinstance(form, list):
    if not isinstance(value, list | tuple):
      return f"{where} is {value!r}, and no list"
    parts = [(f"{where}[{i}]", x, form[0]) for i, x in enumerate(value)]
  else:
    fits = isinstance(value, form) and not (form is int and isinstance(value, bool))
    return None if fits else f"{where} is {value!r}, and no {form.__name__}"
  return next((x for at, part, of in parts if (x := _misfit(part, of, at))), None)
