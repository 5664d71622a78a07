"""A trained model as a function of texts."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oelm.errors import UserError
from oelm.inference.tables import Table
from oelm.inference.trained import Trained
from oelm.models.starts import is_study
from oelm.study.kept_models import best_model

if TYPE_CHECKING:
    import pandas


class Predictions(list[dict[str, Any]]):
    """Answers in the order of the texts, each with its text; `compared` is a line on their agreement with a
    file's column of labels, empty if there is none."""

    compared: str = ""

    def to_pandas(self) -> "pandas.DataFrame":
        import pandas

        return pandas.DataFrame(list(self))


def open_trained(path: Path, say: Callable[[str], None] = lambda text: None) -> Trained:
    """The model of a run or a folder; of a study the best one it kept, whose name is passed to `say`."""
    if not is_study(path):
        return Trained(path)
    best = best_model(path)
    say(f"model: {best}")
    return Trained(best.run)


def _line_of(number: int, text: str | tuple[str, str]) -> str:
    """A text as a line. A tab separates the two texts of a pair, so tabs inside them become spaces."""
    if isinstance(text, str):
        return text
    if not isinstance(text, tuple | list) or not all(isinstance(part, str) for part in text):
        raise UserError(
            f"texts[{number}] is {text!r:.60}: neither a text nor a tuple of two; "
            "leave it out, or give an empty text"
        )
    return "\t".join(part.replace("\t", " ") for part in text)


class Predictor:
    """The model of a run's folder, of a saved model's folder or, of a study's, the best that it kept.

    `oelm.Predictor("x")(["a text"])` gives for each text the answer of `oelm predict` for a line.
    """

    def __init__(self, path: str | Path) -> None:
        self.trained = open_trained(Path(path))

    def __call__(self, texts: str | Iterable[str | tuple[str, str]]) -> Predictions:
        """Answers to texts or, for models of pairs or questions, to tuples of two texts."""
        if hasattr(texts, "columns") or isinstance(texts, Mapping) or not isinstance(texts, Iterable):
            raise UserError(
                f"texts must be a text or a list of texts, not {type(texts).__name__}; of a table give one "
                "column, such as table['text'], of a file its path to Predictor.file"
            )
        given = [texts] if isinstance(texts, str) else texts
        return Predictions(self.trained.predict(_line_of(number, text) for number, text in enumerate(given)))

    def file(
        self, path: str | Path, text: str | None = None, text_pair: str | None = None,
        label: str | None = None,
    ) -> Predictions:  # fmt: skip
        """The rows of a CSV, TSV, JSON or Parquet file with their answers, as `oelm predict` gives them."""
        table = Table(self.trained, path, text, text_pair, label)
        answers = Predictions(table.predict())
        answers.compared = str(table.agreement) if table.reader.compared else ""
        return answers

    def generate(
        self, prompt: str, tokens: int = 100, temperature: float = 0.8, top_k: int = 50, seed: int = 0
    ) -> str:
        """A language model's continuation of the prompt, or an encoder-decoder's target for it."""
        return self.trained.generate(prompt, tokens, temperature, top_k, seed)
