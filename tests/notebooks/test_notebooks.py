"""The notebooks run from top to bottom, and what is committed is the output of such a run."""

import re
import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import ablations
from ablations import store

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
QUICK = "01_first_ablation"
# Roots of file systems and home directories; a lone "/" (as in "a / b" or "</div>") is no path.
ABSOLUTE_PATH = re.compile(
    r"(?<![\w.:/<-])/(?:home|root|tmp|Users|work|usr|opt|mnt|var|private|workspace)\b|[A-Z]:\\\\"
)


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(output):
    """Every text of an output: streams, tracebacks, and all representations but images."""
    if output.output_type == "stream":
        return [output.text]
    if output.output_type == "error":
        return output.traceback
    return [str(value) for kind, value in output.data.items() if not kind.startswith("image/")]


def test_the_larger_run_is_the_one_its_grid_describes():
    grid = ablations.load_grid(ROOT / "ablations" / "grids" / "larger_model.yaml")
    keys = {store.cell_key(cell.configuration()) for cell in grid.report_cells()}
    rows = ablations.load(FOLDER / "larger-run")
    assert set(rows["key"]) == keys
    assert set(rows["status"]) == {"ok"}
    assert {path.name for path in (FOLDER / "larger-run" / "models").iterdir()} == keys


def test_the_walk_through_is_complete():
    assert [path.stem for path in NOTEBOOKS] == ["01_first_ablation", "02_look_inside", "03_larger_model"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs_are_those_of_one_clean_run(path):
    notebook = read(path)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 4
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output.text for output in outputs if output.get("name") == "stderr"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_notebooks_name_no_machine_paths(path):
    notebook = read(path)
    shown = [cell.source for cell in notebook.cells]
    shown += [text for cell in code_cells(notebook) for output in cell.outputs for text in texts(output)]
    for text in shown:
        assert not ABSOLUTE_PATH.search(text), ABSOLUTE_PATH.search(text)
        assert str(Path.home()) not in text


@pytest.mark.parametrize(
    "text", ["in /tmp/ipykernel_7/1.py", "File '/home/me/x.py'", "(/root/.venv)", r"C:\\\\Users"]
)
def test_machine_paths_are_recognised(text):
    assert ABSOLUTE_PATH.search(text)


@pytest.mark.parametrize("text", ["../runs/notebook-01", "a / b", "n/tmp", "</var>", "https://x.org/home"])
def test_other_slashes_are_none(text):
    assert not ABSOLUTE_PATH.search(text)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=() if path.stem == QUICK else pytest.mark.slow)
        for path in NOTEBOOKS
    ],
)
# Jupyter's client closes sockets and loops when the interpreter pleases; what is tested is the notebook.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_notebooks_run_from_top_to_bottom(path, tmp_path, monkeypatch):
    folder = tmp_path / "notebooks"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = read(folder / path.name)
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    assert all(cell.execution_count for cell in code_cells(notebook))
    noise = [o.text for cell in code_cells(notebook) for o in cell.outputs if o.get("name") == "stderr"]
    assert not noise
    for then, now in zip(code_cells(read(path)), code_cells(notebook), strict=True):
        kinds = [[o.output_type for o in cell.outputs if o.output_type != "stream"] for cell in (then, now)]
        assert kinds[0] == kinds[1], then.source
