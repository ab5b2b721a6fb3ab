"""Sphinx's settings of the site, for both languages; `make_site.py` gives the language and what differs by it."""

import json
import re
import sys

import merman
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.directives.code import CodeBlock
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

from site_reference import as_text, inline
from site_search import ChineseSearch

project = "CausalQwen"
html_title = project
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
nitpicky = True
smartquotes = False  # words stay as they are written
nitpick_ignore_regex = [("py:.*", "(?!causalqwen).*")]  # names of torch, transformers and Python have no page here
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_theme_options = {"top_of_page_buttons": ["view"]}  # templates/components puts the other language there
templates_path = ["templates"]
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False

WIDE = re.compile("[\u3400-\u9fff\u2018-\u201d\uff00-\uffef\u3000-\u303f]")
MARK = re.compile("[\u3000-\u303f\uff01-\uff0f\uff1a-\uff20]")
NAME = re.compile(r'(?<=<span class="pre">)[^<]+')
JOINT = re.compile(r"[._/:]+(?=\w)")


class Mermaid(SphinxDirective):
    """A chart as SVG within the page, drawn when the site is built; colours are the theme's, see site.css."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        options = {
            "svg": {"diagram_id": f"chart-{self.env.new_serialno('chart')}"},
            "site_config": {"look": "classic", "theme": "default"},
        }
        try:
            svg = merman.Merman().render_svg("\n".join(self.content), json.dumps(options))
        except merman.MermanError as error:
            raise self.error(f"the chart cannot be drawn: {error}") from error
        return [nodes.raw("", f'<div class="chart">{svg}</div>', format="html")]


def written_behind(name: str, value: object) -> list[str]:
    """The docstring that stands behind a module's variable, where it is defined."""
    for module in [m for n, m in sys.modules.items() if n.startswith("causalqwen") and vars(m).get(name) is value]:
        docs = ModuleAnalyzer.for_module(module.__name__).find_attr_docs()
        if ("", name) in docs:
            return docs["", name]
    return []


def show_docstring(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """What docs/api.md says of a name, where that is all there is, or in the reader's language; then its docstring."""
    known = {short: full for short, full, _ in app.config.entries}
    said = {full: said for _, full, said in app.config.entries}.get(name)
    own = written_behind(name.rpartition(".")[2], value) if what == "data" else list(lines)
    first = [inline(said, known), ""] if said and (app.config.language != "en" or not own) else []
    lines[:] = first + as_text(own, known)


def link_annotation(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, words: nodes.Node
) -> nodes.Node | None:
    """A type of ours in a signature: a link to the name that it is imported by, and its name alone where it has no page."""
    if node.get("reftype") != "class" or not node["reftarget"].startswith("causalqwen."):
        return None
    short = node["reftarget"].rpartition(".")[2]
    full = {short: full for short, full, _ in app.config.entries}.get(short)
    if full is None:
        return words
    return env.domains.python_domain.resolve_xref(env, node["refdoc"], app.builder, "class", full, node, words)


def join_lines(app: Sphinx, doctree: nodes.document) -> None:
    """Chinese has no spaces: the end of a line in the source is none between two characters, nor beside punctuation."""
    if app.config.language == "en":
        return
    for line_end in [text for text in doctree.findall(nodes.Text) if text == "\n"]:
        inside = line_end.parent
        place = inside.index(line_end)
        around = [
            inside[at].astext()[end:][:1] for at, end in ((place - 1, -1), (place + 1, 0)) if 0 <= at < len(inside)
        ]
        if all(map(WIDE.match, around)) or any(map(MARK.match, around)):
            inside.remove(line_end)


def break_names(body: str) -> str:
    """A page on which long names in tables may go on in the next line, behind a dot, a slash, a colon or an underscore."""
    return re.sub(
        r"<td.*?</td>",
        lambda cell: re.sub(NAME, lambda name: JOINT.sub("\\g<0><wbr>", name[0]), cell[0]),
        body,
        flags=re.S,
    )


def finish_page(app: Sphinx, pagename: str, templatename: str, context: dict, doctree: object) -> None:
    """For the templates: the body, and the language that is switched to, its name, and the same page in it."""
    context["body"] = break_names(context.get("body", ""))
    english = app.config.language == "en"
    page = app.builder.get_target_uri(pagename)
    context["other_page"] = context["pathto"](f"zh/{page}" if english else f"../{page}", resource=True)
    context["other_language"], context["other_name"] = ("zh-CN", "中文") if english else ("en", "English")
    context["language"] = "en" if english else "zh-CN"


def setup(app: Sphinx) -> None:
    app.add_config_value("entries", [], "env")
    app.add_directive("mermaid", Mermaid)
    app.add_directive("code-cell", CodeBlock)  # a tutorial's cell, which `make tutorials` runs
    app.add_search_language(ChineseSearch)
    app.connect("autodoc-process-docstring", show_docstring)
    app.connect("doctree-read", join_lines)
    app.connect("missing-reference", link_annotation)
    app.connect("html-page-context", finish_page)
