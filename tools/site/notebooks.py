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
from nbclient import NotebookClient
from nbconvert import MarkdownExporter

_FOLDER = "tutorials"
_SECONDS_FOR_A_CELL = 300

#: What a tutorial says to readers of the repository, who see neither its output nor the notebook.
_WHERE_IT_IS_SHOWN = (
    "The [site](../../CONTRIBUTING.md#run-less-than-everything) shows this page with its output, "
    "and has it as a notebook."
)


def on_files(files: Files, config: Any) -> Files:  # noqa: ANN401 - MkDocs ships no type for its configuration
    """Replace each tutorial by its text with output, and add its notebook and pictures."""
    for page in [file for file in files.documentation_pages() if file.src_uri.startswith(f"{_FOLDER}/")]:
        name = PurePosixPath(page.src_uri).stem
        notebook = with_output(page.content_string)
        text, resources = MarkdownExporter().from_notebook_node(notebook, {"output_files_dir": f"{name}_files"})
        pictures = {f"{_FOLDER}/{path}": content for path, content in resources["outputs"].items()}
        files.remove(page)
        for path, content in {
            page.src_uri: with_link(text, f"{name}.ipynb"),
            f"{_FOLDER}/{name}.ipynb": nbformat.writes(notebook),
            **pictures,
        }.items():
            files.append(File.generated(config, path, content=content))
    return files


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


def with_link(text: str, notebook: str) -> str:
    """Return the text of a tutorial, with a link to the notebook in the place of what only the repository needs.

    Args:
        text: The text.
        notebook: The name of the notebook's file.

    Raises:
        ValueError: The text does not say where the notebook is.
    """
    if _WHERE_IT_IS_SHOWN not in text:
        raise ValueError(f"the tutorial of {notebook} must have this sentence: {_WHERE_IT_IS_SHOWN}")
    return text.replace(_WHERE_IT_IS_SHOWN, f"This page is also a notebook: [download {notebook}]({notebook}).")
