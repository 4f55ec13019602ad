"""A hook of MkDocs: runs the tutorials as notebooks, and shows their output below their code.

A tutorial is a Markdown file whose Python blocks are the cells of a notebook. Each one is run when the site is built,
by a Jupyter kernel of its own; a cell that raises an error ends the build. The site also has the notebook to download.
"""

import tempfile
from pathlib import PurePosixPath
from typing import Any

import jupytext
import nbformat
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbclient import NotebookClient
from nbconvert import MarkdownExporter

_FOLDER = "tutorials"
_SECONDS_FOR_A_CELL = 300

#: The text of each tutorial with its output, by its path in the site.
_texts: dict[str, str] = {}


def on_files(files: Files, config: Any) -> Files:  # noqa: ANN401 - MkDocs ships no type for its configuration
    """Run the tutorials, and add their notebooks and pictures."""
    for page in [file for file in files.documentation_pages() if file.src_uri.startswith(f"{_FOLDER}/")]:
        name = PurePosixPath(page.src_uri).stem
        notebook = with_output(page.content_string)
        text, resources = MarkdownExporter().from_notebook_node(notebook, {"output_files_dir": f"{name}_files"})
        _texts[page.src_uri] = text
        files.append(File.generated(config, f"{_FOLDER}/{name}.ipynb", content=nbformat.writes(notebook)))
        for path, picture in resources["outputs"].items():
            files.append(File.generated(config, f"{_FOLDER}/{path}", content=picture))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:  # noqa: ANN401 - further arguments of MkDocs
    """Return the text of a tutorial with its output; the line below the title becomes a link to the notebook."""
    if page.file.src_uri not in _texts:
        return markdown
    notebook = PurePosixPath(page.file.src_uri).with_suffix(".ipynb").name
    lines = _texts[page.file.src_uri].lstrip().split("\n")
    lines[2] = f"This page is also a notebook: [download {notebook}]({notebook})."
    return "\n".join(lines)


def with_output(tutorial: str) -> nbformat.NotebookNode:
    """Run a tutorial in a temporary directory, and return the notebook with its output.

    Args:
        tutorial: The text of the Markdown file.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell raised an error.
    """
    notebook = jupytext.reads(tutorial, fmt="md")
    with tempfile.TemporaryDirectory() as directory:
        resources = {"metadata": {"path": directory}}
        client = NotebookClient(
            notebook, timeout=_SECONDS_FOR_A_CELL, kernel_name="python3", resources=resources, coalesce_streams=True
        )
        client.execute()
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        # TensorFlow logs to stderr about the machine and its own build.
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook
