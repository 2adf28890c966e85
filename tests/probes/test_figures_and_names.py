"""Every measure by name, its figure, the state explorer, and the guard against other people's packages."""

import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
import torch

mpl.use("Agg")
import matplotlib.pyplot as plt

import probes
from probes import _figures

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {
    "readout": lambda inputs: {"labels": (inputs % 2).cumsum(1) % 2, "at": [5, 23]},
    "causal_share": lambda inputs: {"targets": inputs.roll(-1, 1), "chance": 1 / 12},
    "anchor_horizon": lambda inputs: {"widths": [1, 4]},
    "readback": lambda inputs: {"horizon": 8},
}


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def measured():
    return {}


def get(measured, helpers, name):
    if name not in measured:
        model, inputs = helpers.make("grouped", n_layers=6), helpers.tokens(24, 24)
        measured[name] = probes.measure(model, inputs, name, **OPTIONS.get(name, lambda inputs: {})(inputs))
    return measured[name]


@pytest.mark.parametrize("name", list(probes.MEASURES))
def test_every_measure_runs_by_name_and_draws_into_the_given_axes(measured, helpers, name, tmp_path):
    ds = get(measured, helpers, name)
    assert ds.sizes.get("layer", 6) in (1, 6)
    _, ax = plt.subplots(figsize=(3.25, 2.5), layout="constrained")
    assert probes.plot(ds, name, ax) is ax
    assert ax.get_xlabel()
    assert "n = " in ax.get_title()
    assert len(ax.get_legend_handles_labels()[0]) <= 10  # deep models are capped
    pdf, png = probes.save(ax, tmp_path / name)
    assert pdf.read_bytes().startswith(b"%PDF")
    assert png.read_bytes().startswith(b"\x89PNG")
    alone = probes.plot(ds, name)
    assert alone.figure.get_figwidth() == 3.25


def test_saved_figures_embed_truetype_and_are_the_same_file_twice(tmp_path):
    _, ax = plt.subplots()
    ax.set_xlabel("token")
    first, second = (probes.save(ax, tmp_path / name)[0].read_bytes() for name in ("a.pdf", "b"))
    assert b"/Type42" in first or b"/FontFile2" in first
    assert b"/Type3" not in first
    assert first == second
    assert b"CreationDate" not in first


@pytest.mark.parametrize("name", list(probes.MEASURES))
def test_text_stays_inside_a_column(measured, helpers, name):
    ax = probes.plot(get(measured, helpers, name), name)
    figure = ax.figure
    figure.canvas.draw()
    box = figure.get_tightbbox().transformed(figure.dpi_scale_trans)
    assert box.x0 >= -2
    assert box.x1 <= figure.bbox.x1 + 2
    assert min(t.get_fontsize() for t in ax.get_xticklabels()) >= 6


@pytest.mark.parametrize("name", ["update_rank", "state_rank", "residual_decay", "anchor_horizon"])
def test_panels_that_share_an_axis_show_every_line(measured, helpers, name):
    ds = get(measured, helpers, name)
    low = ds.map(lambda x: 0.1 * x if x.dtype.kind == "f" else x // 10, keep_attrs=True)
    _, axes = plt.subplots(1, 2, sharey=True)
    for panel, ax in zip((low, ds), axes, strict=True):
        probes.plot(panel, name, ax)
    highest = max(np.nanmax(line.get_ydata()) for line in axes[1].get_lines() if len(line.get_ydata()))
    assert axes[1].get_ylim()[0] == 0
    assert axes[1].get_ylim()[1] >= highest


@pytest.mark.parametrize("name", [name for name in probes.MEASURES if name != "causal_share"])
def test_seeds_are_joined_and_drawn(measured, helpers, name):
    one = get(measured, helpers, name)
    other = one.copy(deep=True)
    for variable in other.data_vars.values():
        if variable.dtype.kind == "f":
            variable.values[:] = np.nan_to_num(variable.values) * 0.5
    both = probes.join_seeds([one, other], seeds=[7, 9])
    assert both.sel(seed=7).drop_vars("seed").equals(one)
    assert both.sel(seed=9).drop_vars("seed").equals(other)
    assert both.attrs == one.attrs
    assert "n = 2 seeds" in probes.plot(both, name).get_title()
    with pytest.raises(ValueError, match="datasets: expected the sizes and attributes of the first"):
        probes.join_seeds([one, one.isel(layer=slice(1))])


def test_datasets_survive_a_round_trip_through_dictionaries(measured, helpers):
    import xarray as xr

    for name in ("update_rank", "causal_share"):
        ds = get(measured, helpers, name)
        assert xr.Dataset.from_dict(ds.to_dict()).equals(ds)
        for value in ds.attrs.values():
            assert isinstance(value, (str, int, float)), "attributes must fit a netCDF file"


def test_spectrum_and_windows_have_figures(helpers, measured):
    ds = get(measured, helpers, "state_rank")
    assert probes.plot_spectrum(ds, layer=2).get_title().startswith("layer 2, n = 24")
    assert (
        "rank, sum of 8 writes" in probes.plot_state_rank(get(measured, helpers, "window_rank")).get_ylabel()
    )
    keys = probes.plot_step_cosines(get(measured, helpers, "step_cosines"), which="key")
    assert keys.get_xticklabels()[0].get_text() == "base"
    with pytest.raises(ValueError, match="which: expected 'delta' or 'key', got 'value'"):
        probes.plot_step_cosines(get(measured, helpers, "step_cosines"), which="value")


def test_unknown_measures_and_options_are_named(helpers):
    model, inputs = helpers.make(), helpers.tokens()
    with pytest.raises(ValueError, match=r"name: expected one of .* got 'update_ranks'; close: update_rank"):
        probes.measure(model, inputs, "update_ranks")
    with pytest.raises(ValueError, match="options: state_rank takes at, got window"):
        probes.measure(model, inputs, "state_rank", window=3)
    with pytest.raises(ValueError, match="options: causal_share needs targets, got none"):
        probes.measure(model, inputs, "causal_share")
    assert probes.MEASURES["readout"].needs == ("labels",)
    for name, entry in probes.MEASURES.items():
        assert entry.summary.endswith((".", "?", ":")), name


def test_layers_are_spread_and_capped():
    assert _figures.pick(list(range(24)), 4) == [0, 8, 15, 23]
    assert _figures.pick([5], 4) == [5]


def test_the_static_state_figure_shows_the_state(helpers):
    model, inputs = helpers.make("prism"), helpers.tokens()
    figure = probes.plot_state(model, inputs, 4, layer=1, sample=2)
    field, spectrum, update = figure.axes[:3]
    dense = helpers.Dense(model, inputs, 1)
    np.testing.assert_allclose(
        field.images[0].get_array(), dense.S[2, 4, 0].mT.detach(), rtol=1e-5, atol=1e-7
    )
    sigma = torch.linalg.svdvals(dense.S[2, 4, 0]).detach()
    np.testing.assert_allclose(spectrum.lines[0].get_ydata(), sigma.clamp_min(1e-6 * sigma[0]), rtol=1e-4)
    heights = [bar.get_height() for bar in update.patches]
    np.testing.assert_allclose(heights, torch.linalg.svdvals(dense.update[2, 4, 0])[:3].detach(), rtol=1e-4)
    for options, message in (
        ({"layer": 2}, "layer: expected one of 0, 1, got 2"),
        ({"head": 1}, r"head: expected -1\.\.0, got 1"),
        ({"sample": 3}, r"sample: expected -3\.\.2, got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            probes.plot_state(model, inputs, 4, **options)


def test_the_explorer_slides(helpers, monkeypatch):
    import IPython.display

    shown = []
    monkeypatch.setattr(IPython.display, "display", shown.append)
    box = probes.explore_state(helpers.make("prism"), helpers.tokens(), at=[0, 3, 8])
    slider = box.children[0]
    assert [label for label, _ in slider.options] == ["0", "3", "8"]
    slider.value = 2
    assert len(shown) == 2
    first, second = (figure.axes[0].images[0].get_array() for figure in shown)
    assert not np.allclose(first, second)
    assert shown[0].axes[1].get_ylim() == shown[1].axes[1].get_ylim()


def test_other_packages_called_prism_are_refused(tmp_path):
    (tmp_path / "prism").mkdir()
    (tmp_path / "prism" / "__init__.py").write_text("raise SystemExit('the wrong prism was imported')")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import probes"
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 1
    assert "probes needs prism-lab's own package 'prism'" in run.stderr
    assert "pip uninstall prism" in run.stderr
