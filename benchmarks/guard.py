"""Does this tree compute the same bits as another? Losses, gradient norms, metrics, weights and predictions.

    python benchmarks/guard.py [--old COMMIT_OR_FOLDER] [--new FOLDER] [--json FILE]
    python benchmarks/guard.py --runs gpu --old FOLDER --new FOLDER --json FILE      # on a machine with a GPU

Arithmetic is a contract: the same configuration gives the same losses as long as NUMERICS
(oelm.system.version) stays the same. So the old tree is, unless told otherwise, the commit that last raised
it. Each tree makes the runs of guard_runs.py in a process of its own, on this machine: between machines even
the same code differs. On a GPU each tree makes them twice, because atomic additions may differ from run to
run; a path is compared where both trees repeat themselves. Exits with 1 where a run differs, or fails in the
new tree.
"""

import argparse
import io
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
VERSIONS = ("src/oelm/system/version.py", "src/oelm/version.py")  # now, and in older trees
VALUE = re.compile(r"^NUMERICS = (\d+)", re.MULTILINE)

Digests = dict[str, Any]  # of guard_runs.py: a run's name -> all that it computed


class NoHistory(Exception):
    """The commit to compare with cannot be found."""


# Which tree ------------------------------------------------------------------------------------------------


def git(root: Path, *words: str) -> bytes:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, check=True, timeout=60)
    except FileNotFoundError:
        raise NoHistory("git is not installed") from None
    except subprocess.CalledProcessError as error:
        raise NoHistory(f"git {' '.join(words[:2])}: {error.stderr.decode().strip()}") from None
    return done.stdout


def numerics_at(commit: str, root: Path = ROOT) -> int | None:
    """The value of NUMERICS in a commit; None where it had none, or where there is no such commit."""
    for path in VERSIONS:
        try:
            match = VALUE.search(git(root, "show", f"{commit}:{path}").decode())
        except NoHistory:
            continue
        return int(match[1]) if match else None
    return None


def numerics_here() -> int:
    match = VALUE.search((ROOT / VERSIONS[0]).read_text())
    assert match is not None, f"{VERSIONS[0]} has no line 'NUMERICS = ...'"
    return int(match[1])


def last_raise(root: Path = ROOT) -> str:
    """The last commit that changed the value of NUMERICS."""
    if not (root / ".git").exists():
        raise NoHistory("this tree is not a git checkout")
    commits = git(root, "log", "-G^NUMERICS = ", "--format=%H", "--", *VERSIONS).decode().split()
    cut = git(root, "rev-parse", "--is-shallow-repository").decode().strip() == "true"
    for commit in commits:
        before = numerics_at(f"{commit}^", root)
        if before is None and cut:
            break
        if before != numerics_at(commit, root):
            return commit
    raise NoHistory("no commit in this history changed NUMERICS (a shallow clone?)")


def extracted(commit: str, folder: Path) -> Path:
    """The sources of a commit, in a folder."""
    with tarfile.open(fileobj=io.BytesIO(git(ROOT, "archive", commit, "src"))) as files:
        files.extractall(folder, filter="data")
    return folder


# The runs --------------------------------------------------------------------------------------------------


def start(tree: Path, out: Path, *words: str) -> subprocess.Popen[bytes]:
    """The runs of a tree, in a process of its own."""
    paths = [str(tree.resolve() / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with out.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-P", str(HERE / "guard_runs.py"), str(tree), str(out), *words],
            env=os.environ | threads | {"PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.DEVNULL,
            stderr=log,
        )


def digests(trees: list[Path], folder: Path, *words: str, limit: float | None = None) -> list[Digests]:
    """What each of the trees computes, side by side; after `limit` seconds, as far as they have come."""
    end = None if limit is None else time.monotonic() + limit
    outs = [folder / f"{number}.json" for number in range(len(trees))]
    started = [start(tree, out, *words) for tree, out in zip(trees, outs, strict=True)]
    try:
        for process, tree, out in zip(started, trees, outs, strict=True):
            try:
                failed = process.wait(None if end is None else max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue
            if failed:
                said = out.with_suffix(".log").read_text(errors="replace")
                raise RuntimeError(f"the runs of {tree} ended with {process.returncode}:\n{said[-3000:]}")
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [json.loads(out.read_text()) if out.exists() else {} for out in outs]


# The comparison --------------------------------------------------------------------------------------------


def differences(old: Digests, new: Digests) -> list[str]:
    """What differs between two digests of a run, most telling first; what only `new` has does not count."""
    found = []
    for part, place in (("steps", "step"), ("evaluations", "evaluation at step")):
        for step, values in old[part].items():
            other = new[part].get(step, {})
            names = [name for name, value in values.items() if other.get(name) != value]
            if names:
                pairs = ", ".join(f"{name} {values[name]!r} -> {other.get(name)!r}" for name in names)
                found.append(f"first at {place} {step}: {pairs}")
                break
    for part in ("weights", "predictions"):
        names = [name for name, value in old[part].items() if new[part].get(name) != value]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            found.append(f"{part}: {names[0]}{more} of {len(old[part])}")
    return found


def verdict(old: list[Digests], new: list[Digests]) -> dict[str, Any]:
    """The word on one run, made once or more by each tree: its `status`, and the `differences` if any."""
    for name, runs in (("new", new), ("old", old)):
        if failed := next((run["failed"] for run in runs if "failed" in run), None):
            return {"status": f"fails in {name}", "differences": [failed]}
    unstable = {
        name: found
        for name, runs in (("old", old), ("new", new))
        for again in runs[1:]
        if (found := differences(runs[0], again))
    }
    if unstable:
        found = [f"{name}: {line}" for name, lines in unstable.items() for line in lines]
        return {"status": f"not deterministic in {' and '.join(unstable)}", "differences": found}
    found = differences(old[0], new[0])
    return {"status": "differs" if found else "same bits", "differences": found}


def compare(old: list[Digests], new: list[Digests]) -> dict[str, dict[str, Any]]:
    """The verdict on every run that both trees have made."""
    names = [name for name in new[0] if all(name in made for made in [*old, *new])]
    return {name: verdict([made[name] for made in old], [made[name] for made in new]) for name in names}


def is_broken(entry: dict[str, Any]) -> bool:
    """Whether a verdict breaks the contract. What the old tree cannot repeat it did not promise."""
    return entry["status"] in ("differs", "fails in new", "not deterministic in new")


def machine() -> dict[str, Any]:
    import torch
    import transformers

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return versions | {"transformers": transformers.__version__, "gpu": gpu, "cpu": platform.machine()}


def report(verdicts: dict[str, dict[str, Any]]) -> str:
    lines = []
    for name, entry in verdicts.items():
        lines.append(f"{name}: {entry['status']}")
        lines += [f"    {line}" for line in entry["differences"]]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--old", help="a commit, or a folder with src in it; default: the last raise of NUMERICS"
    )
    parser.add_argument("--new", type=Path, default=ROOT, help="a folder with src; default: this one")
    parser.add_argument("--runs", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--only", nargs="+", default=[], help="names of runs")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--model", help="instead of gpt-tiny (cpu) or gpt-medium-512 (gpu)")
    parser.add_argument("--limit", type=float, help="seconds after which the runs made so far are compared")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    words = ["--runs", options.runs]
    for name in ("steps", "model"):
        if getattr(options, name) is not None:
            words += [f"--{name}", str(getattr(options, name))]
    words += ["--only", *options.only] if options.only else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            old = options.old or last_raise()
            tree = Path(old) if Path(old).is_dir() else extracted(old, folder / "old")
        except NoHistory as reason:
            parser.error(f"{reason}; name a commit or a folder with --old")
        times = 2 if options.runs == "gpu" else 1
        trees = [tree] * times + [options.new] * times
        made = digests(trees, folder, *words, limit=options.limit)
    verdicts = compare(made[:times], made[times:])
    print(f"old: {old}, new: {options.new}\n{report(verdicts) or 'no run was made by both in time'}")
    if options.json:
        paths = {name: made[-1][name].get("paths") for name in verdicts}
        record = {"what": "two trees, bit for bit", "arguments": words, "machine": machine()}
        record |= {"old": str(old), "new": str(options.new), "runs": verdicts, "paths": paths}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(not verdicts or any(map(is_broken, verdicts.values())))


if __name__ == "__main__":
    sys.exit(main())
