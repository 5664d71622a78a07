"""A cache of their own for the tests of data, and tokenizers small enough to make on the spot."""

from pathlib import Path
from typing import Any

import pytest

from tests.data.made import wordpiece


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("OELM_CACHE_DIR", str(folder))
    return folder


@pytest.fixture(scope="session")
def bert() -> Any:
    return wordpiece()


@pytest.fixture
def bert_folder(bert: Any, tmp_path: Path) -> str:
    bert.save_pretrained(tmp_path / "bert")
    return str(tmp_path / "bert")
