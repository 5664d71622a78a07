"""Claims on a shared folder: whatever workers do, a run has one owner and is handed over once."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.study.run_claims import MOST_LOST, Queue
from oelm.study.work import Worker

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


def worker(root: Path, owner: str, clock: Clock) -> Worker:
    return Worker(root, Queue(root, owner, EXPIRES, clock), say=lambda line: None)


def begin(one: Worker, mark: str = "") -> Path | None:
    """Take a run, and put something into its folder as training does."""
    claim = one.queue.take()
    if claim is None:
        return None
    one.queue.bring_work(claim)
    claim.work.mkdir(exist_ok=True)
    with (claim.work / "steps").open("a") as file:
        file.write(mark)
    one.claims[claim.work] = (claim, one.root / "runs" / claim.name)
    return claim.work


def look_for(other: Worker, clock: Clock, seconds: float) -> Path | None:
    """What another worker takes within so many seconds of its own clock."""
    for _ in range(int(seconds / 5)):
        if (work := begin(other, other.queue.owner)) is not None:
            return work
        clock.now += 5
    return None


def test_thirty_workers_take_every_run_once(tmp_path):
    names = [f"{n:03d}" for n in range(60)]
    make_queue(tmp_path, names)

    def take_all(n: int) -> list[str]:
        queue, taken = Queue(tmp_path, f"w{n}"), []
        while (claim := queue.take()) is not None:
            taken.append(claim.name)
        return taken

    with ThreadPoolExecutor(30) as pool:
        taken = [name for part in pool.map(take_all, range(30)) for name in part]
    assert sorted(taken) == names


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
@given(seed=st.integers(0, 2**32), skews=st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3))
def test_whatever_workers_do_every_run_is_handed_over_once(tmp_path_factory, seed, skews):
    """Workers take runs, beat, stop for long, die and finish in any order; in the end each run's folder was
    written by workers that had it one after another."""
    rng, root = random.Random(seed), tmp_path_factory.mktemp("study")
    queue = make_queue(root, ["a", "b", "c"])
    clocks = [Clock(skew) for skew in skews]
    workers = [worker(root, str(n), clock) for n, clock in enumerate(clocks)]
    published: list[str] = []
    for turn in range(400):
        n = rng.randrange(3)
        one = workers[n]
        action = rng.choice(["take", "take", "beat", "time", "time", "finish", "die"])
        if action == "take":
            begin(one, f"{n}")
        elif action == "time":  # for all of them, at different speeds
            for clock in clocks:
                clock.now += rng.uniform(5, 40)
        elif action == "die" and turn < 300:
            workers[n] = worker(root, str(n), clocks[n])
        elif one.claims:
            work = rng.choice(list(one.claims))
            claim, folder = one.claims[work]
            if action == "beat" and not claim.beat():
                del one.claims[work]
            elif action == "finish":
                before = folder.exists()
                one._publish(work)
                published += [claim.name] if folder.exists() and not before else []
    assert sorted(published + queue.names()) == ["a", "b", "c"]
    for name in published:
        assert (root / "runs" / name / "steps").read_text()
