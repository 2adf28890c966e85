"""The wheel holds the four packages and nothing else, and works away from the checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"prism", "tasks", "probes", "ablations"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source = tmp_path_factory.mktemp("source")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    out = tmp_path_factory.mktemp("wheel")
    # No isolation: the build needs setuptools alone, which the dev extra brings, and no network.
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)],
        check=True, capture_output=True,
    )  # fmt: skip
    (path,) = out.glob("prism_lab-*.whl")
    return path


def test_top_level_names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == PACKAGES
    shipped = {name for name in names if name.endswith(".py")}
    in_checkout = {
        str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")
    }
    assert shipped == in_checkout, "pyproject.toml lists every package by hand; one is missing there"
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)


def test_imports_away_from_the_checkout(wheel, tmp_path):
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = (
        "import prism, tasks, probes, ablations\n"
        "for module in (prism, tasks, probes, ablations):\n"
        f"    assert module.__file__.startswith({str(site)!r}), module.__file__\n"
        "import torch\n"
        "model = prism.PrismModel(prism.PrismConfig(vocab_size=tasks.get('xor').vocab_size))\n"
        "assert model(tasks.get('xor').batch(2).inputs).isfinite().all()\n"
    )
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", ["probes", "ablations"])
@pytest.mark.parametrize("stranger", ["prism", "tasks"])
def test_a_stranger_of_the_same_name_is_named(wheel, tmp_path, package, stranger):
    """prism, tasks and probes are other people's distributions too: say which one was found, and where."""
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    first = tmp_path / "first"
    (first / stranger).mkdir(parents=True)
    (first / stranger / "__init__.py").write_text("")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(first), str(site)])}
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import {package}"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert str(first / stranger) in last


@pytest.mark.parametrize("package", ["probes", "ablations"])
def test_a_folder_that_hides_an_editable_package_is_named(tmp_path, package):
    """An editable installation is found after sys.path, on which any folder is a package to Python."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    code = (
        "import importlib.machinery, importlib.util, pathlib, sys\n"
        f"root = pathlib.Path({str(ROOT)!r})\n"
        f"sys.path = [{str(tmp_path)!r}] + [p for p in sys.path if pathlib.Path(p).resolve() != root]\n"
        "class Editable:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        if name in {PACKAGES!r}:\n"
        "            return importlib.util.spec_from_file_location(name, root / name / '__init__.py')\n"
        "sys.meta_path.append(Editable)\n"
        f"import {package}\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last == (
        f"ImportError: {package} needs prism-lab's own package 'tasks' at {ROOT / 'tasks'}, but 'tasks' "
        f"is hidden by a folder of that name without __init__.py: {folder}. "
        "Rename it, or start Python elsewhere."
    )
