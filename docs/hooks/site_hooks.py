"""MkDocs hooks: the command line in the reference, the changelog, and links to files outside docs/.

In the repository a page may link to any file. The site has a copy of such a file below files/; a folder is
named and not linked.
"""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
LOG = logging.getLogger("mkdocs.hooks")  # a warning ends a strict build
OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./([^)#\s]+)(?:#[^)]*)?\)")
SHOWN = (".json", ".svg", ".png")  # by a browser, as they are; others get the ending .txt


def on_files(files, config):
    files.append(File.generated(config, "changelog.md", abs_src_path=str(ROOT / "CHANGELOG.md")))
    return files


def on_page_markdown(markdown, page, config, files):
    if page.file.src_uri == "reference.md":
        markdown = markdown.replace("<!-- every verb -->", command_line())
    return OUTSIDE.sub(lambda link: inside(link[1], link[2], page, config, files), markdown)


def on_page_content(html, page, config, files):
    return re.sub(r"<p>(.*?)</p>", fields, html, flags=re.S) if page.file.src_uri == "reference.md" else html


def fields(paragraph):
    """Lines of a docstring that explain fields in columns, as a list."""
    entries = re.split(r"^\s*(\w+) {2,}(?=\S)", paragraph[1], flags=re.M)
    items = zip(entries[1::2], entries[2::2], strict=True)
    listed = "".join(f"<li><code>{name}</code>: {text}</li>" for name, text in items)
    return f"<p>{entries[0]}</p><ul>{listed}</ul>" if listed else paragraph[0]


def inside(label, path, page, config, files):
    """The link to a file of the repository as the site can have it."""
    source = ROOT / path
    if source.is_dir():
        return f"`{path}`" if label in path else f"{label} (`{path}`)"
    if not source.is_file():
        LOG.warning("%s links to %s, which does not exist", page.file.src_uri, path)
        return label
    uri = f"files/{path}" if source.suffix in SHOWN else f"files/{path}.txt"
    if files.get_file_from_path(uri) is None:
        files.append(File.generated(config, uri, abs_src_path=str(source)))
    return f"[{label}]({uri})"


def command_line():
    """What command_line.py prints, in a process of its own."""
    script = Path(__file__).with_name("command_line.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        [sys.executable, script], env=environment, check=True, capture_output=True, text=True
    ).stdout
