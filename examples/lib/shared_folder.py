"""Writes and reads small files of JSON in a folder that several hosts share."""

import json
import os
import pathlib
import socket
from typing import Any


def publish(path: pathlib.Path, content: object) -> None:
  """Writes a file in one piece; if several hosts write it, the first one wins."""
  temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
  temporary.write_text(json.dumps(content))
  try:
    os.link(temporary, path)
  except FileExistsError:
    pass
  finally:
    temporary.unlink()


def read(path: pathlib.Path) -> Any:
  """Reads a file of :func:`publish`; SystemExit if it is damaged."""
  return parsed(path, path.read_bytes())


def parsed(path: pathlib.Path, text: bytes) -> Any:
  try:
    return json.loads(text)
  except ValueError as error:
    raise SystemExit(f"{path} must be whole: {error}; remove the folder.") from error
