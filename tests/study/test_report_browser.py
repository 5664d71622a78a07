"""The report in a real browser: at a phone's and a desktop's width, light and dark, in both languages."""

import html
import json
import os
import re
import shutil
import subprocess

import pytest

from oelm.study.report import write_report
from tests.study.report_folders import make_study

pytestmark = pytest.mark.slow

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (360, 390, 1280)
LONG = "a-task-with-a-name-longer-than-any-phone-is-wide-" * 3 + "<b>|$x$"

# The page stands in frames of the widths asked for, for a browser's own window cannot be as narrow as a
# phone. What is measured there is written into the document, which the browser prints when it is done.
HARNESS = """<!doctype html><meta charset="utf-8"><body><pre id="found"></pre><script>
const page = %(page)s, widths = %(widths)s, found = [];
function look(frame, width) {
  frame.contentDocument.querySelectorAll("details").forEach((e) => { e.open = true; });
  const doc = frame.contentDocument, root = doc.documentElement, view = frame.contentWindow;
  const shown = (e) => { const b = e.getBoundingClientRect(); return [b.left, b.right, b.height]; };
  return {
    width, scroll: root.scrollWidth, client: root.clientWidth,
    background: view.getComputedStyle(doc.body).backgroundColor,
    ink: view.getComputedStyle(doc.body).color,
    resources: view.performance.getEntriesByType("resource").length,
    led: [...doc.querySelectorAll(".led tr")].map(
      (row) => [...row.children].map((e) => e.getBoundingClientRect().left)),
    tables: [...doc.querySelectorAll(".scroll")].map((e) => e.getBoundingClientRect().right),
    figures: [...doc.querySelectorAll("figure svg")].map((svg) => ({
      box: shown(svg),
      marks: [...svg.querySelectorAll("path, use")].filter((e) => e.closest("[id*=line2d], [id*=Collection]"))
        .filter((e) => { const b = e.getBBox(); return b.width + b.height > 0; }).length,
      texts: [...svg.querySelectorAll("text")].map(shown),
      colours: [...svg.querySelectorAll("text")].map((e) => view.getComputedStyle(e).fill),
    })),
  };
}
for (const width of widths) {
  const frame = document.createElement("iframe");
  frame.style = `border: 0; width: ${width}px; height: 900px`;
  frame.onload = () => {
    found.push(look(frame, width));
    if (found.length == widths.length) document.getElementById("found").textContent = JSON.stringify(found);
  };
  frame.srcdoc = page;
  document.body.append(frame);
}
</script>"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Reports to look at: one task, several with hostile names, a language model."""
    if CHROMIUM is None:
        reason = "no chromium, chromium-browser or google-chrome on the PATH"
        pytest.fail(reason) if os.environ.get("OELM_REQUIRE_CHROMIUM") else pytest.skip(reason)
    root = tmp_path_factory.mktemp("browser")
    several = ("imdb", LONG, "ag_news", "sst2")
    return {
        "one": make_study(root / "one", items=100),
        "several": make_study(root / "several", ("baseline", "oelm", "oelm-random"), several),
        "lm": make_study(root / "lm", tasks=("tinystories",), metric="perplexity"),
    }


def look(folder, lang, scheme):
    """What the browser measures at each width, and what it has to complain about."""
    written = write_report(folder, lang)
    page = json.dumps(written.html.read_text(encoding="utf-8")).replace("</", "<\\/")
    harness = folder / "harness.html"
    harness.write_text(HARNESS % {"page": page, "widths": json.dumps(WIDTHS)}, encoding="utf-8")
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--hide-scrollbars",  # as a phone does
            f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000", "--enable-logging=stderr",
            f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}",
            "--virtual-time-budget=10000", "--dump-dom", harness.as_uri(),
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    text = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert text and text[1], done.stderr[-2000:]
    return json.loads(html.unescape(text[1])), [
        line for line in done.stderr.splitlines() if "CONSOLE" in line
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("name", ["one", "several", "lm"])
def test_nothing_overflows_and_every_figure_is_drawn(pages, name, lang, scheme):
    found, complaints = look(pages[name], lang, scheme)
    assert complaints == []
    assert sorted(page["width"] for page in found) == sorted(WIDTHS)
    for page in found:
        assert page["client"] == page["width"] and page["scroll"] <= page["client"]
        assert page["resources"] == 0
        assert max(page["tables"]) <= page["client"]  # wide ones scroll inside their own box
        assert len(page["led"]) >= 3
        for lefts in page["led"]:  # the verdict, a row's last cell, comes first on a phone
            assert lefts[-1] == (min if page["width"] <= 390 else max)(lefts) and len({*lefts}) == len(lefts)
        dark = sum(map(int, re.findall(r"\d+", page["background"])[:3])) < 3 * 128
        assert dark == (scheme == "dark")
        assert len(page["figures"]) >= 3
        for figure in page["figures"]:
            left, right, height = figure["box"]
            assert 250 < right - left <= page["client"] and height > 50
            assert figure["marks"] >= 2
            for start, end, size in figure["texts"]:
                assert start >= 0 and end <= page["client"], "a text leaves the page"
                assert size > 9, "a text too small to read"
            assert page["background"] not in figure["colours"]
