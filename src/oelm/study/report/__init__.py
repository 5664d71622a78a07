"""Reports: an analysis as Markdown, as one self-contained HTML page, as a table in the terminal, as JSON."""

from dataclasses import dataclass
from pathlib import Path

from oelm.errors import UserError
from oelm.study.analysis import analyse
from oelm.study.report.build import build
from oelm.study.report.document import to_html, to_markdown
from oelm.study.report.summary import as_plain, summary
from oelm.study.report.view import View, Words
from oelm.study.result_types import Analysis
from oelm.system.files import write_text
from oelm.system.terminal import plain

__all__ = ["Written", "as_plain", "summary", "write_report"]


@dataclass(frozen=True)
class Written:
    """Where a report was written, and the numbers it was made from."""

    markdown: Path
    html: Path
    analysis: Analysis


def write_report(folder: Path, lang: str = "en") -> Written:
    """Report on a study, or on any folder with runs below: report.md and report.html in that folder, in
    Chinese (`lang="zh"`) report.zh.md and report.zh.html."""
    words = Words(lang)
    analysis = analyse(folder)
    stem = "report" if lang == "en" else f"report.{lang}"
    written = Written(folder / f"{stem}.md", folder / f"{stem}.html", analysis)
    document = build(View(analysis, words), str(folder))
    try:
        write_text(written.markdown, plain(to_markdown(document, words, written.html.name)))
        write_text(written.html, plain(to_html(document, words)))
    except OSError as error:
        raise UserError(f"cannot write {error.filename or folder}: {error.strerror}") from None
    return written
