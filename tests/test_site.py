"""The site: every page in both languages, docstrings as they are, and errors for whatever a reader would stumble over."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import site_pages
from site_check import check_site
from site_pages import Page, find_pages, lay_out
from site_reference import as_text, read_sections

ROOT = Path(__file__).parent.parent
MADE = [sys.executable, str(ROOT / "docs" / "site" / "make_site.py")]


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_every_page_of_the_repository_stands_in_a_part_and_has_its_other_language():
    pages = [page for part in find_pages(ROOT).values() for page in part]
    assert len(pages) == len({page.name for page in pages}) > 12


SMALL = {
    "README.md": "# Front\n\n[中文](README.zh.md)\n\nSee [more](docs/more.md#a-place), [code](run.py), [all](docs).\n",
    "README.zh.md": "# 首页\n\n[English](README.md)\n\n见[更多](docs/more.zh.md#地方)。\n",
    "docs/more.md": "# More\n\n[中文](more.zh.md)\n\n## A place\nBack [home](../README.md).\n",
    "docs/more.zh.md": "# 更多\n\n[English](more.md)\n\n## 地方\n[首页](../README.md)。\n",
    "docs/api.md": "# Names\n\n## Losses\nFrom `causalqwen`.\n\n| name | what |\n|---|---|\n| `cauchy_crps` | a score |\n",
    "docs/api.zh.md": "# 名字\n\n## 损失\n来自 `causalqwen`。\n\n| 名字 | 是什么 |\n|---|---|\n| `cauchy_crps` | 评分 |\n",
    "run.py": "",
}


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A repository of three pages."""
    parts = {("Start", "开始"): ("docs/more.md", "docs/api.md"), ("Tutorials", "教程"): ("docs/tutorials/*.md",)}
    monkeypatch.setattr(site_pages, "PARTS", parts)
    return write(tmp_path / "repository", SMALL)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("docs/more.zh.md", None, r"docs/more\.md lacks its Chinese page, more\.zh\.md"),
        ("docs/more.md", None, r"Start names docs/more\.md, which is not there"),
        ("docs/other.md", "# Other", r"docs/other\.md stands in no part"),
        ("docs/other.zh.md", "# Other", r"docs/other\.zh\.md stands in no part"),
        ("docs/tutorials/one.md", "# One", r"docs/tutorials/one\.md lacks its Chinese page"),
    ],
)
def test_a_page_without_its_other_language_or_its_place_is_refused(small, file, text, message):
    (small / file).unlink() if text is None else write(small, {file: text})
    with pytest.raises(ValueError, match=message):
        find_pages(small)


def test_pages_keep_their_lines_and_lead_to_each_other(small, tmp_path):
    lay_out(small, tmp_path / "zh", "zh")
    lay_out(small, tmp_path / "en", "en")
    assert "见[更多](/more.md#地方)" in (tmp_path / "zh/index.md").read_text(encoding="utf-8")
    assert "[首页](/index.md)" in (tmp_path / "zh/more.md").read_text(
        encoding="utf-8"
    )  # though it named the English one
    english = (tmp_path / "en/index.md").read_text(encoding="utf-8")
    assert english.split("\n")[4] == "See [more](/more.md#a-place), [code](/run.py), all."
    assert (tmp_path / "en/run.py").is_file() and "[中文]" not in english
    assert "Tutorials" not in english
    write(small, {"docs/tutorials/one.md": "# One", "docs/tutorials/one.zh.md": "# 一"})
    lay_out(small, tmp_path / "more", "zh")
    assert ":caption: 教程\n:maxdepth: 1\n\ntutorials/one\n" in (tmp_path / "more/index.md").read_text(encoding="utf-8")
    assert Page.of("docs/tutorials/one.md").name == "tutorials/one"


def test_pages_of_research_have_one_line_of_the_navigation(small, tmp_path, monkeypatch):
    parts = {("Project", "项目"): ("docs/research/index.md", "docs/research/log/*.md"), **site_pages.PARTS}
    monkeypatch.setattr(site_pages, "PARTS", parts)
    pages = ("docs/research/index", "docs/research/log/one")
    write(small, {f"{page}{ending}": "# One\n" for page in pages for ending in (".md", ".zh.md")})
    lay_out(small, tmp_path / "en", "en")
    front, index = ((tmp_path / "en" / name).read_text(encoding="utf-8") for name in ("index.md", "research/index.md"))
    assert "\nresearch/index\n" in front and "research/log/one" not in front
    assert index == "# One\n\n```{toctree}\n:hidden:\n\n/research/log/one\n```\n"


HTML = """<html lang="{}"><title>T</title><link rel="stylesheet" href="{}a.css">
<a href="{}">other</a><a href="b.html#x">b</a></html>"""
PLACE = '<html lang="{}"><title>T</title><a href="{}">other</a><p id="x"><img src="{}p.svg"></html>'
BUILT = {
    "index.html": HTML.format("en", "", "zh/index.html"),
    "b.html": PLACE.format("en", "zh/b.html", ""),
    "zh/index.html": HTML.format("zh-CN", "../", "../index.html"),
    "zh/b.html": PLACE.format("zh-CN", "../b.html", "../"),
    "a.css": "body { background: url('p.svg') }",
    "p.svg": '<svg xmlns="http://www.w3.org/2000/svg"/>',
}


def test_a_site_with_nothing_wrong_has_no_errors(tmp_path):
    assert check_site(write(tmp_path, BUILT)) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "error"),
    [
        ("index.html", "b.html#x", "c.html", "index.html: c.html leads nowhere"),
        ("index.html", "b.html#x", "b.html#y", "index.html: b.html#y leads to no place in b.html"),
        ("index.html", "b.html#x", "#x", "index.html: #x leads to no place in index.html"),
        ("index.html", "b.html#x", "../b.html", "index.html: ../b.html leads nowhere"),
        ("b.html", "p.svg", "q.svg", "b.html: q.svg leads nowhere"),
        ("b.html", "p.svg", "https://a.org/p.svg", "b.html: https://a.org/p.svg is fetched from a network"),
        ("b.html", "p.svg", "//a.org/p.svg", "b.html: //a.org/p.svg is fetched from a network"),
        ("index.html", "a.css", "https://a.org/a.css", "index.html: https://a.org/a.css is fetched from a network"),
        ("a.css", "p.svg", "https://a.org/p.svg", "a.css: https://a.org/p.svg is fetched from a network"),
        ("zh/b.html", "../b.html", "index.html", "zh/b.html: nothing leads to b.html"),
        ("zh/b.html", "zh-CN", "en", "zh/b.html: in the language en"),
        ("b.html", '"en"', '"zh-CN"', "b.html: in the language zh-CN"),
        ("zh/b.html", ' lang="zh-CN"', "", "zh/b.html: in the language of nobody"),
        ("b.html", "<title>T</title>", "", "b.html: no title"),
        ("index.html", '<a href="b.html#x">', "<a>", "b.html: more than 2 clicks from index.html"),
    ],
)
def test_what_is_wrong_on_a_site_is_told(tmp_path, file, old, new, error):
    assert old in BUILT[file]
    assert error in check_site(write(tmp_path, {**BUILT, file: BUILT[file].replace(old, new)}))


def test_a_page_that_one_language_lacks_is_told(tmp_path):
    built = {name: text for name, text in BUILT.items() if name != "zh/b.html"}
    assert "b.html: there is no zh/b.html" in check_site(write(tmp_path, built))


def test_docstrings_keep_their_words_marks_and_formulas():
    known = {"ovr_loss": "causalqwen.ovr_loss"}
    text = """A *score* of loc_U, |W_k|; see `ovr_loss`
and `x[0]`'s.

    P_k = P(S_k > C_k)
      + 1

Args:
    loc, scale: [N], a
        *b.
    targets: `int64`.

Returns:
    one score
"""
    assert as_text(text.rstrip().split("\n"), known) == [
        r"A \*score\* of loc\_U\, \|W\_k\|\; see \ :py:obj:`ovr_loss <causalqwen.ovr_loss>`\  and \ ``x[0]``\ \'s\.",
        "",
        "::",
        "",
        "       P_k = P(S_k > C_k)",
        "         + 1",
        "",
        ".. rubric:: Args",
        "",
        r"- **loc\, scale**: \[N\]\, a \*b\.",
        "",
        r"- **targets**: \ ``int64``\ \.",
        "",
        ".. rubric:: Returns",
        "",
        "one score",
        "",
    ]


def test_names_of_the_reference_are_found_where_they_are_said_to_be():
    with pytest.raises(ValueError, match="no_such_name is in none of causalqwen"):
        read_sections("## A\nFrom `causalqwen`.\n\n| `no_such_name` | nothing |\n")
    (entries,) = read_sections(SMALL["docs/api.md"]).values()
    assert [(entry.name, entry.said) for entry in entries] == [("causalqwen.cauchy_crps", "a score")]


@pytest.mark.slow
def test_the_site_is_built_in_two_minutes_without_a_warning(tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [*MADE, str(tmp_path / "site")], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 120
    for place, titles in (("", ("Theory", "Start")), ("zh/", ("理论", "开始"))):
        page = (tmp_path / "site" / f"{place}theory.html").read_text(encoding="utf-8")
        assert all(title in page for title in titles), place
        reference = (tmp_path / "site" / f"{place}api/losses-and-distributions.html").read_text(encoding="utf-8")
        assert 'id="causalqwen.linear_ovr_loss"' in reference and "Products run in the dtype of" in reference
        charts = (tmp_path / "site" / f"{place}diagrams.html").read_text(encoding="utf-8")
        assert charts.count("<svg id=") == 4
    chinese = tmp_path / "site" / "zh"
    assert 'lang="zh-CN"' in (chinese / "changelog.html").read_text(encoding="utf-8")[:200]
    words = (chinese / "_static" / "language_data.js").read_text(encoding="utf-8")
    assert "function splitQuery(" in words and "window.Stemmer = EnglishStemmer" in words
    assert f"{json.dumps('个体')}:" in (chinese / "searchindex.js").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of Python's, which the extensions give
def test_pages_look_as_they_are_written(small, tmp_path):
    from make_site import build

    more = "\n个体\n与噪声，\nU 与\nS。\n\n| `a.long_name` |\n|---|\n| `a.long_name`, a--b |\n"
    write(small, {"docs/more.zh.md": SMALL["docs/more.zh.md"] + more})
    assert build(small, tmp_path / "site") == []
    page = (tmp_path / "site/zh/more.html").read_text(encoding="utf-8")
    assert "个体与噪声，U 与\nS。" in page
    assert '<span class="pre">a.<wbr>long_<wbr>name</span></code>, a--b' in page
    names = [(tmp_path / f"site/{place}api/losses.html").read_text(encoding="utf-8") for place in ("", "zh/")]
    assert ["评分" in text for text in names] == [False, True]
    with pytest.raises(ValueError, match="is there and is no site"):
        build(small, small)
    assert build(small, tmp_path / "site") == []


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of Python's, which the extensions give
@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        (None, None, ""),
        ("docs/more.md", "\n[dead](nowhere.md)\n", "'nowhere.md'"),
        ("docs/more.zh.md", "\n[dead](api.zh.md#nowhere)\n", "nowhere"),
        ("docs/more.md", "\n```nolanguage\nx\n```\n", "nolanguage"),
        ("docs/more.md", "\n```mermaid\ngraph TD\n  a[\n```\n", "more.md"),
    ],
)
def test_a_warning_leaves_no_site(small, tmp_path, capfd, file, text, told):
    from make_site import build

    if file:
        write(small, {file: (small / file).read_text(encoding="utf-8") + text})
    errors = build(small, tmp_path / "site")
    assert bool(errors) == bool(file)
    assert (tmp_path / "site").exists() != bool(file)
    assert told in capfd.readouterr().err
