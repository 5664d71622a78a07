"""Arithmetic is a contract: this tree computes the same bits as the commit that last raised NUMERICS.

Stored losses (tests/study/test_numerics.py) can only be compared loosely, since they come from another
machine. Here both trees run on this one: benchmarks/guard.py. OELM_GUARD_COMMIT names another commit.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import guard

# Appended to a file of a copy of this tree: the same sums in another order.
REORDERED = {
    "the feed-forward product in two halves": (
        "models/gpt_block.py",
        """
def _in_halves(self, x):
    y, weight, half = F.gelu(self.fc_in(x)), self.fc_out.weight, self.fc_out.weight.shape[1] // 2
    first = torch.nn.functional.linear(y[..., :half], weight[:, :half])
    return first + torch.nn.functional.linear(y[..., half:], weight[:, half:], self.fc_out.bias)


FeedForward.forward = _in_halves
""",
    ),
    "the norm of the gradients from the last to the first": (
        "speed/step.py",
        """
_from_first = clip_in_step


def clip_in_step(optimizer, parameters, clip):
    return _from_first(optimizer, parameters[::-1], clip)
""",
    ),
}


@pytest.fixture(scope="module")
def commit() -> str:
    """The commit to compare with. Without the history: skip, or fail where CI says it must be there."""
    if named := os.environ.get("OELM_GUARD_COMMIT"):
        return named
    try:
        raised = guard.last_raise()
    except guard.NoHistory as reason:
        if os.environ.get("OELM_REQUIRE_DATA"):
            pytest.fail(str(reason))
        pytest.skip(str(reason))
    if guard.numerics_at(raised) != guard.numerics_here():
        pytest.skip("NUMERICS is raised in the working tree: once that is committed, it is compared with")
    return raised


def test_the_same_bits_as_when_numerics_was_last_raised(commit, tmp_path):
    old = guard.extracted(commit, tmp_path / "old")
    then, now = guard.digests([old, guard.ROOT], tmp_path)
    verdicts = guard.compare([then], [now])
    assert verdicts.keys() == now.keys()
    told = f"arithmetic changed since {commit[:12]}: undo it, or raise NUMERICS\n{guard.report(verdicts)}"
    assert not any(map(guard.is_broken, verdicts.values())), told
    # The old tree may not know a setting that came later; these it knows.
    assert verdicts["baseline"]["status"] == verdicts["language model"]["status"] == "same bits", told


@pytest.mark.slow
def test_another_order_of_summation_is_noticed(tmp_path):
    trees = [guard.ROOT, *(copy_of_this_tree(tmp_path / str(i)) for i in range(len(REORDERED)))]
    for tree, (file, code) in zip(trees[1:], REORDERED.values(), strict=True):
        with (tree / "src" / "oelm" / file).open("a") as sources:
            sources.write(code)
    now, *changed = guard.digests(trees, tmp_path, "--only", "baseline")
    for name, other in zip(REORDERED, changed, strict=True):
        verdicts = guard.compare([now], [other])
        told = f"{name}: {guard.report(verdicts)}"
        assert guard.is_broken(verdicts["baseline"]), told
        assert "first at step" in told and "weights: " in told, told


def copy_of_this_tree(folder: Path) -> Path:
    shutil.copytree(guard.ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_the_commit_that_last_raised_numerics_is_found(tmp_path):
    root, clone = tmp_path / "root", tmp_path / "clone"
    (root / guard.VERSIONS[0]).parent.mkdir(parents=True)
    with pytest.raises(guard.NoHistory, match="not a git checkout"):
        guard.last_raise(root)
    guard.git(root, "init", "-q")
    commits = []
    for text in ("NUMERICS = 1", "NUMERICS = 2", "NUMERICS = 2  # of losses", "# versions\nNUMERICS = 2"):
        (root / guard.VERSIONS[0]).write_text(text + "\n")
        guard.git(root, "add", ".")
        guard.git(root, "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", text)
        commits.append(guard.git(root, "rev-parse", "HEAD").decode().strip())
    assert guard.last_raise(root) == commits[1]
    assert guard.numerics_at(commits[0], root) == 1
    guard.git(tmp_path, "clone", "-q", "--depth", "2", root.as_uri(), str(clone))
    with pytest.raises(guard.NoHistory, match="shallow"):
        guard.last_raise(clone)


def made(loss: float, weight: str = "a") -> dict[str, Any]:
    return {"steps": {"1": {"loss": loss}}, "evaluations": {}, "weights": {"w": weight}, "predictions": {}}


def test_what_does_not_repeat_itself_is_not_compared():
    same, other, failed = made(1.0), made(1.5), {"failed": "UserError: unknown key"}
    word = lambda old, new: guard.verdict(old, new)["status"]  # noqa: E731
    assert word([same, same], [same, same]) == "same bits"
    assert word([same, other], [same, same]) == "not deterministic in old"
    assert word([same, same], [same, other]) == "not deterministic in new"
    assert word([same, other], [same, other]) == "not deterministic in old and new"
    assert word([same, same], [other, other]) == "differs"
    assert word([failed], [same]) == "fails in old"
    assert word([same], [failed]) == "fails in new"
    assert guard.differences(same, made(1.0, "b")) == ["weights: w of 1"]
