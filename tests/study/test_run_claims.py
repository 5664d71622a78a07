"""Claims on a shared folder: whatever workers do, a run has one owner and is handed over once."""

import errno
import json
import os
import random
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.errors import UserError
from oelm.study import run_claims
from oelm.study.run_claims import FIRST_LOOK, MOST_LOST, Claim, Queue
from oelm.study.work import Worker, has_result
from oelm.training.stopping import Stop

EXPIRES = 60.0


class Clock:
    """A machine's clock: `skew` seconds off, and it moves when the test says so."""

    def __init__(self, skew: float = 0.0) -> None:
        self.now = skew

    def __call__(self) -> float:
        return self.now


def make_queue(root: Path, names: list[str]) -> Queue:
    queue = Queue(root)
    queue.open()
    for name in names:
        queue.add(name, {"folder": f"runs/{name}"})
    return queue


def worker(root: Path, owner: str, clock: Clock, expires: float = EXPIRES) -> Worker:
    return Worker(root, Queue(root, owner, expires, clock), say=lambda line: None)


def begin(one: Worker, mark: str = "") -> Path | None:
    """Take a run, and put something into its folder as training does."""
    claim = one.queue.take()
    if claim is None:
        return None
    one.queue.move_work_folder(claim)
    claim.work.mkdir(exist_ok=True)
    with (claim.work / "steps").open("a") as file:
        file.write(mark)
    one.claims[claim.work] = (claim, one.root / "runs" / claim.name)
    one.queue.refresh()
    return claim.work


def look_for(other: Worker, clock: Clock, seconds: float) -> Path | None:
    """What another worker takes within so many seconds of its own clock."""
    for _ in range(int(seconds / 5)):
        if (work := begin(other, other.queue.owner)) is not None:
            return work
        clock.now += 5
    return None


@pytest.mark.parametrize("look", [4, FIRST_LOOK])
def test_thirty_workers_take_every_run_once(tmp_path, monkeypatch, look):
    """Also where a worker's first look shows few of the runs, and whether or not it then lists all."""
    monkeypatch.setattr(run_claims, "FIRST_LOOK", look)
    names = [f"{n:03d}" for n in range(60)]
    make_queue(tmp_path, names)

    def take_all(n: int) -> list[str]:
        queue, taken = Queue(tmp_path, f"w{n}"), []
        while (claim := queue.take()) is not None:
            taken.append(claim.name)
            if n % 2:
                queue.refresh()
        return taken

    with ThreadPoolExecutor(30) as pool:
        taken = [name for part in pool.map(take_all, range(30)) for name in part]
    assert sorted(taken) == names


def test_of_many_runs_a_claim_lists_few_and_the_worker_all_of_them_after_it(tmp_path, monkeypatch):
    queue = make_queue(tmp_path, [f"{n:03d}" for n in range(FIRST_LOOK + 100)])
    listed, listdir = list[str](), os.listdir

    def list_folder(path):
        listed.append(Path(path).name)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", list_folder)
    one = Queue(tmp_path, "one")
    for _ in range(5):
        assert one.take() is not None
    assert "jobs" not in listed
    one.refresh()
    assert listed.count("jobs") == 1
    for _ in range(5):  # nobody else takes any: what it has listed is current
        assert one.take() is not None
        one.refresh()
    assert listed.count("jobs") == 1
    while one.take() is not None:
        pass
    assert Queue(tmp_path, "other").take() is None  # it has looked at all of them
    assert all(state.event == "claim" for _, state in queue.states())


def test_dead_workers_runs_are_taken_over_by_one_whose_first_look_shows_few(tmp_path, monkeypatch):
    monkeypatch.setattr(run_claims, "FIRST_LOOK", 2)
    names = [f"{n:03d}" for n in range(10)]
    make_queue(tmp_path, names)
    dead, clock = Queue(tmp_path, "dead", EXPIRES), Clock()
    while dead.take() is not None:
        pass
    other, claims = Queue(tmp_path, "other", EXPIRES, clock), list[Claim]()
    for _ in range(int(2 * EXPIRES / 5)):
        while (claim := other.take()) is not None:
            claims.append(claim)
            assert clock.now >= EXPIRES
        assert all(claim.beat() for claim in claims)
        clock.now += 5
    assert sorted(claim.name for claim in claims) == names
    assert {(claim.number, claim.lost) for claim in claims} == {(2, 1)}


@pytest.mark.parametrize("skew", [0.0, -3e6, 3e6])
def test_a_silent_worker_loses_its_run_and_a_beating_one_does_not_whatever_the_clocks_say(tmp_path, skew):
    make_queue(tmp_path, ["a"])
    here, there = Clock(), Clock(skew)
    one, other = worker(tmp_path, "one", here), worker(tmp_path, "other", there)
    work = begin(one, "one,")
    assert work is not None
    claim = one.claims[work][0]
    for _ in range(20):
        assert claim.beat()
        assert begin(other) is None
        there.now += EXPIRES / 2
    assert look_for(other, there, 2 * EXPIRES) is not None  # silent from here on
    assert (tmp_path / "queue/.work/a.2/steps").read_text() == "one,other"  # it goes on from what was there
    assert not claim.beat()


def test_a_worker_that_wakes_up_late_overwrites_nothing(tmp_path):
    make_queue(tmp_path, ["a"])
    clock = Clock()
    late, other = worker(tmp_path, "late", Clock()), worker(tmp_path, "other", clock)
    work = begin(late, "late,")
    assert work is not None
    taken = look_for(other, clock, 3 * EXPIRES)
    assert taken is not None
    work.mkdir()  # asleep no longer, its training writes a whole result where its folder used to be
    (work / "steps").write_text("late, and wrong")
    late._publish(work)
    assert not (tmp_path / "runs/a").exists()
    assert late.queue.names() == ["a"]
    other._publish(taken)
    assert (tmp_path / "runs/a/steps").read_text() == "late,other"
    assert late.queue.names() == []


def test_a_worker_keeps_its_run_for_as_long_as_it_has_asked_for(tmp_path):
    """Whatever a hasty observer would wait."""
    make_queue(tmp_path, ["a"])
    clock = Clock()
    slow, hasty = worker(tmp_path, "slow", Clock(), 600.0), worker(tmp_path, "hasty", clock, 30.0)
    assert begin(slow) is not None
    assert look_for(hasty, clock, 590) is None
    assert look_for(hasty, clock, 60) is not None


def test_an_observer_that_was_held_up_counts_anew(tmp_path):
    """Storage that stands still keeps the owner from its beats and the other from its looks."""
    make_queue(tmp_path, ["a"])
    clock = Clock()
    one, other = worker(tmp_path, "one", Clock()), worker(tmp_path, "other", clock)
    assert begin(one) is not None
    assert look_for(other, clock, EXPIRES / 2) is None
    clock.now += 10 * EXPIRES
    assert look_for(other, clock, EXPIRES - 10) is None
    assert look_for(other, clock, 30) is not None


def test_a_result_handed_over_late_stays_in_its_place(tmp_path, unbroken):
    """One that wakes up between the looks of the worker that takes its run over and its first move."""
    queue = make_queue(tmp_path, ["a"])
    (queue.jobs / "a" / "job.json").write_text(json.dumps({"folder": "runs/a"}))
    clock = Clock()
    late, other = worker(tmp_path, "late", Clock()), worker(tmp_path, "other", clock)
    work = begin(late)
    assert work is not None
    shutil.copytree(unbroken()[1], work, dirs_exist_ok=True)
    claim, folder = late.claims[work]
    assert claim.end("finished")
    while (taken := other.queue.take()) is None:
        clock.now += 5
    bring, said = other.queue.move_work_folder, list[str]()
    placed: list[int] = []

    def bring_late(claim):
        folder.parent.mkdir()
        late._move(work, folder)
        placed.append(folder.stat().st_ctime_ns)
        bring(claim)

    other.queue.move_work_folder = bring_late  # type: ignore[method-assign]
    other._check = lambda values: None  # type: ignore[method-assign]
    other.say = said.append
    other._start(taken)
    assert has_result(folder) and folder.stat().st_ctime_ns == placed[0], "it was moved once more"
    assert not said and queue.names() == [] and not list(queue.work.iterdir())


def test_what_a_local_study_left_is_taken_over_when_the_run_is_queued(tmp_path):
    queue = make_queue(tmp_path, [])
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "steps").write_text("local,")
    queue.add("a", {"folder": "runs/a"}, tmp_path / "runs" / "a")
    one = worker(tmp_path, "one", Clock())
    work = begin(one, "one")
    assert work is not None
    one._publish(work)
    assert (tmp_path / "runs/a/steps").read_text() == "local,one"


def test_a_result_makes_room_for_itself_where_there_is_none(tmp_path, unbroken):
    make_queue(tmp_path, ["a", "b"])
    one = worker(tmp_path, "one", Clock())
    for name, other in (("a", "unfinished"), ("b", "finished")):
        work = begin(one, "mine")
        assert work is not None and work.stem == name
        folder = tmp_path / "runs" / name
        if other == "finished":
            shutil.copytree(unbroken()[1], folder)
        else:
            folder.mkdir(parents=True)
            (folder / "steps").write_text("not mine")
        one._publish(work)
    assert (tmp_path / "runs/a/steps").read_text() == "mine"
    assert not (tmp_path / "runs/b/steps").exists()  # the first result counts
    assert [path.read_text() for path in tmp_path.glob("damaged/*/steps")] == ["not mine"]


class Storage:
    """Shared storage that answers claims with an error as often as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failures, self._open = 0, os.open
        monkeypatch.setattr(os, "open", self.open)

    def open(self, path, *more):
        if "queue" in str(path) and self.failures:
            self.failures -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return self._open(path, *more)


def test_storage_that_fails_for_a_moment_costs_no_run_and_for_long_the_run(tmp_path, monkeypatch):
    queue, storage = make_queue(tmp_path, ["a"]), Storage(monkeypatch)
    clock = Clock()
    one = worker(tmp_path, "one", clock)
    storage.failures = 1
    with pytest.raises(OSError, match=os.strerror(errno.ESTALE)) as raised:
        one._take_runs()
    one._wait_for_storage(raised.value)  # the worker's loop goes on
    clock.now += EXPIRES
    work = begin(one)
    assert work is not None
    for failures in (1000, 0, 1000):
        storage.failures = failures
        clock.now += EXPIRES / 2
        one._beat()
        assert one.claims
    clock.now += EXPIRES / 2
    one._beat()
    assert not one.claims
    storage.failures = 0
    work = look_for(one, clock, 3 * EXPIRES)
    assert work is not None
    storage.failures = 2
    one._publish(work)
    assert queue.names() == [] and (tmp_path / "runs" / "a").exists()
    one.failing = -1e6
    with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
        one._wait_for_storage(raised.value)


def test_a_run_that_this_machine_cannot_train_is_given_back(tmp_path, monkeypatch):
    import torch

    queue = make_queue(tmp_path, [])
    (tmp_path / "dataset").mkdir()
    values = {"folder": "runs/a", "dataset": str(tmp_path / "dataset"), "table": {"gpus_per_run": 4}}
    queue.add("a", values | {"memory_bytes": 1e9, "config": {}})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # of this machine
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    one = worker(tmp_path, "one", Clock())
    one._check = lambda values: None  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"study\.gpus_per_run is 4, but there are 2 GPUs"):
        one._take_runs()
    assert queue.state("a").event == "released"  # type: ignore[union-attr]


def test_a_run_given_back_is_taken_at_once_and_one_that_ended_is_not_taken_again(tmp_path):
    queue = make_queue(tmp_path, ["a"])
    one, other = worker(tmp_path, "one", Clock()), worker(tmp_path, "other", Clock())
    work = begin(one, "one,")
    assert work is not None and one.claims[work][0].end("released")
    taken = begin(other, "other")
    assert taken is not None
    other._publish(taken)
    assert queue.answer("a") is None
    assert begin(worker(tmp_path, "third", Clock())) is None
    assert (tmp_path / "runs/a/steps").read_text() == "one,other"


def test_a_run_that_no_worker_survives_has_failed(tmp_path):
    queue = make_queue(tmp_path, ["a"])
    (tmp_path / "dataset").mkdir()
    values = {"folder": "runs/a", "dataset": str(tmp_path / "dataset"), "numerics": None}
    (queue.jobs / "a" / "job.json").write_text(json.dumps(values))
    for n in range(MOST_LOST + 1):
        clock = Clock()
        one = worker(tmp_path, f"w{n}", clock)
        claim = one.queue.take()
        while claim is None:
            clock.now += 5
            claim = one.queue.take()
        assert claim.lost == n
    one._check = lambda values: None  # type: ignore[method-assign]  # whatever the version here
    one._start(claim)
    answer = queue.answer("a")
    assert answer is not None and answer["kind"] == "process"
    assert answer["reason"]["values"] == {"count": MOST_LOST}
    queue.add("a", values)  # the study tries again, and the numbers go on
    assert worker(tmp_path, "next", Clock()).queue.state("a").event == "released"  # type: ignore[union-attr]
    assert queue.state("a").number == MOST_LOST + 3  # type: ignore[union-attr]


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    skews=st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3),
    look=st.sampled_from([1, FIRST_LOOK]),
)
def test_whatever_workers_do_every_run_is_handed_over_once(tmp_path_factory, seed, skews, look):
    """Workers take runs, beat, stop for long, die, write where they have lost a run, and finish. In the end
    each result was written by all that had the run, one after another, and by no other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_claims, "FIRST_LOOK", look)
        hand_over_at_random(tmp_path_factory.mktemp("study"), seed, skews)


def hand_over_at_random(root: Path, seed: int, skews: list[float]) -> None:
    rng = random.Random(seed)
    queue = make_queue(root, ["a", "b", "c"])
    clocks = [Clock(skew) for skew in skews]
    workers = [worker(root, str(n), clock) for n, clock in enumerate(clocks)]
    published: list[str] = []
    written = dict.fromkeys(("a", "b", "c"), "")  # by whom, in the order of the claims
    numbers = dict.fromkeys(written, 0)
    for turn in range(400):
        n = rng.randrange(3)
        one = workers[n]
        action = rng.choice(["take", "take", "beat", "time", "time", "finish", "die", "write"])
        if action == "take":
            if (work := begin(one, f"{n},")) is not None:
                written[work.stem] += f"{n},"
                assert numbers[work.stem] < one.claims[work][0].number
                numbers[work.stem] = one.claims[work][0].number
        elif action == "time":  # for all of them, at different speeds
            for clock in clocks:
                clock.now += rng.uniform(2, 15)
        elif action == "die" and turn < 300:
            workers[n] = worker(root, str(n), clocks[n])
        elif one.claims:
            work = rng.choice(list(one.claims))
            claim, folder = one.claims[work]
            if action == "write" and (root / "queue/jobs" / claim.name / str(claim.number + 1)).exists():
                work.mkdir(exist_ok=True)  # it has lost the run and does not know
                with (work / "steps").open("a") as file:
                    file.write("late")
            elif action == "beat" and not claim.beat():
                del one.claims[work]
            elif action == "finish":
                before = folder.exists()
                one._publish(work)
                published += [claim.name] if folder.exists() and not before else []
    assert sorted(published + queue.names()) == ["a", "b", "c"]
    for name in published:
        assert (root / "runs" / name / "steps").read_text() == written[name]


def test_a_worker_that_waits_longer_than_idle_since_others_train_says_so_once(tmp_path):
    make_queue(tmp_path, ["a"])
    assert Queue(tmp_path, "other").take() is not None
    said = list[str]()
    one = Worker(tmp_path, Queue(tmp_path, "one", 1.0), say=said.append)
    one.run(Stop(), 0.1)
    waits, leaves = said
    assert re.fullmatch(
        r"nothing to do for \d s; others train, .*: leaving after 2 s \(twice --expires\)", waits
    )
    assert leaves.endswith("leaving")
