"""Stores: complete or absent, shared by processes, and at home on another machine."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from oelm.data import load_file, manifest, open_store, prepare
from oelm.data.manifest import FORMAT
from oelm.data.writer import ArrayWriter, cached_store, copy_store
from oelm.errors import UserError
from oelm.system.files import cache_dir, folder_beside
from tests.data.made import labelled


def _prepare(path: Path, **options: object) -> Path:
    return prepare(load_file(path, text="body", label="topic"), tokenizer="train:300", **options).folder


def test_the_second_time_it_is_found_not_made(tmp_path: Path, cache: Path) -> None:
    path = labelled(tmp_path / "x.csv")
    folder = _prepare(path)
    stamp = (folder / "store.json").stat().st_mtime_ns
    assert _prepare(path) == folder
    assert (folder / "store.json").stat().st_mtime_ns == stamp
    assert folder.is_relative_to(cache)


def test_anything_that_changes_the_tokens_changes_the_store(tmp_path: Path) -> None:
    path = labelled(tmp_path / "x.csv")
    folders = {_prepare(path), _prepare(path, max_length=32)}
    data = load_file(path, text="body", label="topic")
    folders.add(prepare(data, tokenizer="train:301").folder)
    folders.add(
        prepare(load_file(path, text="body", label="topic", split_seed=4), tokenizer="train:300").folder
    )
    folders.add(
        prepare(load_file(path, text="body", label="topic", train_size=20), tokenizer="train:300").folder
    )
    path.write_text(path.read_text().replace("yes", "sure"))
    folders.add(_prepare(path))
    assert len(folders) == 6


TRAINING_PATH = """
import sys
for name in ("datasets", "pyarrow", "pandas", "pydantic", "sklearn", "typer", "rich"):
    sys.modules[name] = None  # an import of it fails
from oelm.data import Plan, Windows, open_store, packed_batch, padded_batch
store = open_store(sys.argv[1])
train = store["train"]
batches = Plan(train.lengths, batch_size=4, seed=0).epoch(0)
seen = sorted(int(i) for step in range(len(batches)) for i in packed_batch(train, batches.batch(step)).ids)
assert seen == sorted(train.ids.tolist())
batch = padded_batch(train, batches.batch(0), store.pad_id)
print(len(store.tokenizer()), store.label_names, batch.targets["labels"].shape)
"""


def test_a_copied_store_opens_where_the_data_and_its_libraries_are_not(tmp_path: Path, cache: Path) -> None:
    path = labelled(tmp_path / "x.csv")
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(_prepare(path), elsewhere)
    shutil.rmtree(cache)
    path.unlink()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OELM_")}
    done = subprocess.run(
        [sys.executable, "-c", TRAINING_PATH, str(elsewhere)], env=environment, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "300 ['no', 'yes'] torch.Size([4])\n"


def _slow_make(root: str, log: str) -> None:
    def make(folder: Path) -> dict[str, object]:
        with Path(log).open("a") as file:
            file.write("made\n")
        time.sleep(0.5)
        return {"splits": {}, "task": "t", "kind": "k", "metric": "m", "label_names": [], "max_length": 1,
                "tokenizer": {"name": "x", "vocab_size": 1, "pad_id": 0}, "warnings": [], "pairs": False,
                "dropped": {}, "duplicates": {}}  # fmt: skip

    cached_store(Path(root), "x", "f" * 64, make)


def test_processes_that_ask_together_make_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    log = tmp_path / "log"
    asking = [context.Process(target=_slow_make, args=(str(tmp_path), str(log))) for _ in range(4)]
    for process in asking:
        process.start()
    for process in asking:
        process.join()
    assert [process.exitcode for process in asking] == [0] * 4
    assert log.read_text() == "made\n"


def test_a_killed_process_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    log = tmp_path / "log"
    victim = context.Process(target=_slow_make, args=(str(tmp_path), str(log)))
    victim.start()
    while not log.exists():
        time.sleep(0.01)
    os.kill(victim.pid or 0, signal.SIGKILL)
    victim.join()
    store = tmp_path / "stores" / f"x-{'f' * 16}-{FORMAT}"
    assert not store.exists()
    _slow_make(str(tmp_path), str(log))
    assert sorted(path.name for path in store.parent.iterdir()) == [store.name, store.name + ".lock"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, UserError])
def test_an_interrupted_preparation_leaves_nothing_half_written(
    tmp_path: Path, error: type[BaseException]
) -> None:
    def make(folder: Path) -> dict[str, object]:
        (folder / "train.tokens.npy").write_bytes(b"half")
        raise error

    with pytest.raises(error):
        cached_store(tmp_path, "x", "f" * 64, make)
    assert [path.suffix for path in (tmp_path / "stores").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    path = labelled(tmp_path / "x.csv")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write to the cache .*file.*set OELM_CACHE_DIR"):
        _prepare(path, cache=tmp_path / "file")


def test_a_file_size_limit_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    """A stand-in for a full disk: the kernel refuses to let any file grow past the limit."""
    labelled(tmp_path / "x.csv", rows=3000)
    script = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from oelm.data import load_file, prepare; from oelm.errors import UserError\n"
        "data = load_file(sys.argv[1], text='body', label='topic')\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))\n"
        "try: prepare(data, tokenizer='train:300', cache=sys.argv[2])\n"
        "except UserError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "x.csv"), str(tmp_path / "c")],
        text=True, capture_output=True,
    )  # fmt: skip
    assert done.stdout.startswith(f"cannot write to the cache {tmp_path / 'c'} (the disk is full, or files")
    assert [path.suffix for path in (tmp_path / "c" / "stores").iterdir()] == [".lock"]


STARVED = """
import resource, sys, pydantic
import oelm.cli.main, oelm.data, oelm.data.checks, transformers.models.auto.tokenization_auto
sys.argv = ["oelm", "data", "inspect", sys.argv[1]]
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (4 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
oelm.cli.main.main()
"""


def test_memory_that_does_not_suffice_is_no_damage(tmp_path: Path) -> None:
    """A limit on addresses (`ulimit -v`) lets nothing be mapped any more."""
    folder = _prepare(labelled(tmp_path / "x.csv"))
    offsets = np.load(folder / "train.offsets.npy")
    np.save(folder / "train.offsets.npy", np.tile(offsets, 1 + (32 << 20) // offsets.nbytes))
    meta = json.loads((folder / "store.json").read_text())
    meta = {key: value for key, value in meta.items() if key not in ("checksums", "digest")}
    (folder / "store.json").write_text(json.dumps(manifest.seal(meta, folder)))
    done = subprocess.run([sys.executable, "-c", STARVED, str(folder)], text=True, capture_output=True)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("oelm: out of memory: ") and "Traceback" not in done.stderr
    assert "damaged" not in done.stderr and "train.offsets.npy" in done.stderr


def test_folders_that_are_no_store(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"is not a prepared dataset: it has no store\.json, and no \.txt files"
    ):
        open_store(tmp_path)
    (tmp_path / "store.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        open_store(tmp_path)
    (tmp_path / "store.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(UserError, match="has format 99, this version reads 3; prepare the data again"):
        open_store(tmp_path)


def test_a_damaged_store_says_which_file(tmp_path: Path) -> None:
    store = copy_store(open_store(_prepare(labelled(tmp_path / "x.csv"))), tmp_path / "copy")
    (tmp_path / "copy" / "train.tokens.npy").write_bytes(b"")
    with pytest.raises(UserError, match=r"train\.tokens\.npy is damaged"):
        _ = store["train"].tokens
    with pytest.raises(UserError, match="has no split 'dev'; it has: train, validation, test"):
        _ = store["dev"]


def test_copying_onto_something_is_refused(tmp_path: Path) -> None:
    store = open_store(_prepare(labelled(tmp_path / "x.csv")))
    with pytest.raises(UserError, match="exists already"):
        copy_store(store, tmp_path)


def test_a_users_own_part_is_left_alone(tmp_path: Path) -> None:
    """What is written beside the folder asked for has a name that is nobody's."""
    store = open_store(_prepare(labelled(tmp_path / "x.csv")))
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part" / "mine.txt").write_text("precious")
    copy_store(store, tmp_path / "out")
    assert (tmp_path / "out.part" / "mine.txt").read_text() == "precious"
    assert not [*tmp_path.glob(".*")]


def test_a_copy_that_was_killed_is_made_the_next_time(tmp_path: Path) -> None:
    """What the killed one left is deleted; what another process is still writing is not."""
    store = open_store(_prepare(labelled(tmp_path / "x.csv")))

    def stop_halfway(ready: "multiprocessing.synchronize.Event") -> None:
        with folder_beside(tmp_path / "out") as beside:
            (beside / "half").write_text("")
            ready.set()
            time.sleep(600)

    context = multiprocessing.get_context("fork")
    ready = context.Event()
    writer = context.Process(target=stop_halfway, args=(ready,))
    writer.start()
    assert ready.wait(60)
    copy_store(store, tmp_path / "out")
    assert len([*tmp_path.glob(".out.oelm-*.part/half")]) == 1
    shutil.rmtree(tmp_path / "out")
    os.kill(writer.pid or 0, signal.SIGKILL)
    writer.join()
    assert copy_store(store, tmp_path / "out").fingerprint == store.fingerprint
    assert not [*tmp_path.glob(".*")]


def test_the_lock_of_the_cache_is_no_way_to_another_file(tmp_path: Path) -> None:
    path = labelled(tmp_path / "x.csv")
    folder = _prepare(path)
    shutil.rmtree(folder)
    lock = folder.with_suffix(".lock")
    (tmp_path / "mine.txt").write_text("precious")
    for target in (tmp_path / "mine.txt", tmp_path / "made-through-a-link"):
        lock.unlink()
        lock.symlink_to(target)
        with pytest.raises(UserError, match=r"\.lock is a link or a special file where a lock was expected"):
            _prepare(path)
    assert (tmp_path / "mine.txt").read_text() == "precious"
    assert not (tmp_path / "made-through-a-link").exists()
    lock.unlink()
    os.mkfifo(lock)
    with pytest.raises(UserError, match="special file"):
        _prepare(path)


def _flip_labels(folder: Path) -> None:
    """As an editor of bytes would: the file keeps its size."""
    labels = np.load(folder / "train.labels.npy", mmap_mode="r+")
    labels[:] = 1 - labels
    labels.flush()


def test_labels_flipped_on_disk_are_noticed(tmp_path: Path) -> None:
    store = copy_store(open_store(_prepare(labelled(tmp_path / "x.csv"))), tmp_path / "copy")
    _flip_labels(store.folder)
    with pytest.raises(UserError, match=r"train\.labels\.npy was changed .*; prepare the data again"):
        open_store(store.folder)


def test_class_names_changed_on_disk_are_noticed(tmp_path: Path) -> None:
    store = copy_store(open_store(_prepare(labelled(tmp_path / "x.csv"))), tmp_path / "copy")
    manifest = store.folder / "store.json"
    manifest.write_text(manifest.read_text().replace('"no"', '"on"'))
    with pytest.raises(UserError, match=r"store\.json was changed or damaged"):
        open_store(store.folder)


def test_a_damaged_store_of_the_cache_is_set_aside_and_made_again(tmp_path: Path) -> None:
    path = labelled(tmp_path / "x.csv")
    folder = _prepare(path)
    right = np.load(folder / "train.labels.npy")
    _flip_labels(folder)
    store = prepare(load_file(path, text="body", label="topic"), tokenizer="train:300")
    assert store["train"].labels.tolist() == right.tolist()
    assert store.warnings[-1].code == "data.prepared_again"
    assert "train.labels.npy was changed or damaged" in str(store.warnings[-1])
    assert np.load(folder.with_name(folder.name + ".damaged") / "train.labels.npy").tolist() != right.tolist()


def test_a_process_checks_a_store_once(tmp_path: Path) -> None:
    """The runs of a study that one process makes open the same store again and again."""
    store = copy_store(open_store(_prepare(labelled(tmp_path / "x.csv"))), tmp_path / "copy")
    opened: list[str] = []
    watching = True
    sys.addaudithook(
        lambda event, args: opened.append(str(args[0])) if event == "open" and watching else None
    )
    for _ in range(3):
        open_store(store.folder)
    watching = False
    assert str(store.folder / "store.json") in opened
    assert [name for name in opened if name.startswith(str(store.folder)) and name.endswith(".npy")] == []


@pytest.mark.parametrize("large", [True, False])
def test_a_large_store_that_was_whole_is_not_read_by_the_next_process(tmp_path, monkeypatch, large) -> None:
    """As long as the state of its files is the same, though a file's time was set back after a change."""
    monkeypatch.setattr(manifest, "LARGE", 1 if large else 1 << 30)
    monkeypatch.setattr(manifest, "SETTLED", 0.0)
    folder = copy_store(open_store(_prepare(labelled(tmp_path / "x.csv"))), tmp_path / "copy").folder
    read: list[Path] = []
    sha256 = manifest.sha256
    monkeypatch.setattr(manifest, "sha256", lambda path: read.append(path) or sha256(path))

    def next_process() -> int:
        read.clear()
        manifest._verify.cache_clear()
        open_store(folder)
        return len(read)

    next_process()
    assert (next_process() == 0) == large
    labels = folder / "train.labels.npy"
    before = labels.stat()
    labels.write_bytes(labels.read_bytes())  # the same bytes: read again, and whole
    os.utime(labels, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert next_process() > 0
    _flip_labels(folder)
    os.utime(labels, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(UserError, match=r"train\.labels\.npy was changed"):
        next_process()


def test_a_store_that_was_just_written_is_not_remembered(tmp_path, monkeypatch) -> None:
    """A change in the same tick of the file system's clock would not show."""
    monkeypatch.setattr(manifest, "LARGE", 1)
    folder = copy_store(open_store(_prepare(labelled(tmp_path / "x.csv"))), tmp_path / "copy").folder
    manifest._verify.cache_clear()
    open_store(folder)
    assert not [*(cache_dir() / "verified").glob("*")]


def test_an_array_written_in_pieces_is_a_numpy_file(tmp_path: Path) -> None:
    writer = ArrayWriter(tmp_path / "x.npy", np.uint16)
    whole = np.arange(0, 60_000, 7)
    for piece in np.array_split(whole, 11):
        writer.append(piece)
    writer.close()
    assert np.load(tmp_path / "x.npy").tolist() == whole.tolist()


def test_a_number_too_large_for_its_column_is_never_wrapped(tmp_path: Path) -> None:
    writer = ArrayWriter(tmp_path / "x.npy", np.uint16)
    with pytest.raises(OverflowError, match="does not fit uint16"):
        writer.append(np.array([70_000]))
    writer.close()
