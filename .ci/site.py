"""Hooks of mkdocs: notebooks as pages, the list of public names, and links to files that are not part of the site."""

import json
import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import angpt

log = logging.getLogger("mkdocs.site")
ROOT = Path(__file__).parents[1]
API = "<!-- api: "
LINK = re.compile(r"\[([^\[\]]*)\]\(([^()\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Replace each notebook by a page of its cells."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
        text = "\n\n".join(map(as_markdown, json.loads(file.content_string)["cells"]))
        files.append(File.generated(config, file.src_uri.replace(".ipynb", ".md"), content=text))
    return files


def as_markdown(cell: dict[str, Any]) -> str:
    text = "".join(cell["source"])
    return f"```python\n{text}\n```" if cell["cell_type"] == "code" else text


def on_config(config: Any) -> Any:
    """The navigation names notebooks as they are in docs/."""
    config.nav = json.loads(json.dumps(config.nav).replace(".ipynb", ".md"))
    return config


def api() -> str:
    """A heading for each module with public names, and mkdocstrings' directive for each name."""
    directives = {module: [f"::: angpt.{module}.{name}" for name in names] for module, names in angpt._PUBLIC.items()}
    return "\n\n".join(f"## angpt.{module}\n\n" + "\n".join(lines) for module, lines in directives.items())


def titles(nav: list[Any]) -> dict[str, str]:
    """The names that the navigation gives to pages, by their paths."""
    found: dict[str, str] = {}
    for entry in nav:
        for title, target in entry.items() if isinstance(entry, dict) else ():
            found |= {target: title} if isinstance(target, str) else titles(target)
    return found


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links whose text is the name of a file have the title of the page instead. Links that the site cannot follow, to
    code and to folders, lead to the repository (REPO_URL), or become text."""
    if API in markdown:
        return markdown.partition(API)[0] + api()
    here, named = posixpath.dirname(f"docs/{page.file.src_uri}"), titles(config.nav)

    def rewrite(found: re.Match[str]) -> str:
        text, target = found[1], found[2]
        if "://" in target or target.startswith("#"):
            return found[0]
        name, hash_, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(here, name))
        if name.endswith(".ipynb"):
            name, path = (f"{text.removesuffix('.ipynb')}.md" for text in (name, path))
        if path.startswith("docs/") and not (ROOT / path).is_dir():
            is_file = text.endswith((".md", ".ipynb"))
            return f"[{named.get(path.removeprefix('docs/'), text) if is_file else text}]({name}{hash_}{anchor})"
        if not (ROOT / path).exists():
            log.warning("%s: %s is linked and does not exist", page.file.src_uri, target)
        return f"[{text}]({config.repo_url}/blob/main/{path}{hash_}{anchor})" if config.repo_url else text

    code = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)
    parts = code.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(rewrite, part) for part in parts)
