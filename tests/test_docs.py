"""The Python code of the documentation runs: each page's blocks, one after the other as one script, over ranks.

The names of models in it are directories here, which are looked for before the hub: tiny models of the same kind. A page says
how many ranks it needs in a comment, `<!-- ranks: 4 -->`, 2 if it doesn't; a block after <!-- not run --> is left out, as is one
in another language.
"""

import re

import pytest

from tests.jobs import ROOT, run_job
from tests.shelf import make_shelf

BLOCK = re.compile(r"^(<!-- not run -->\n+)?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def read_script(text):
    """The blocks, each at its line of the page, so that a traceback names that."""
    script = ""
    for found in BLOCK.finditer(text):
        if found[1] is None:
            start = text.count("\n", 0, found.start(2))
            script += "\n" * (start - script.count("\n")) + found[2]
    return script


def list_pages():
    """README, and the others as it names them: a reader may run all in one directory."""
    text = (ROOT / "README.md").read_text()
    pages = sorted((ROOT / "docs").glob("*.md"), key=lambda page: (text.find(f"docs/{page.name}") % len(text), page.name))
    return [page for page in [ROOT / "README.md", *pages] if read_script(page.read_text())]


PAGES = list_pages()


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return make_shelf(tmp_path_factory.mktemp("shelf"))


def test_the_blocks_are_found():
    page = "a\n```python\nx = 1\n```\n```\nno\n```\n<!-- not run -->\n```python\ny\n```\n```yaml\nz\n```\n```python\nx\n```\n"
    found = {number: line for number, line in enumerate(read_script(page).split("\n"), 1) if line}
    assert found == {3: "x = 1", 16: "x"} and page.split("\n")[15] == "x"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_runs(page, shelf):
    ranks = re.search(r"<!-- ranks: (\d+) -->", text := page.read_text())
    script = shelf / f"{page.stem}.py"
    script.write_text(read_script(text))
    run_job(script, cwd=shelf, size=int(ranks[1]) if ranks else 2)
