import json
import os

import pytest

from ablations import store

CONFIGURATION = {
    "task": {"name": "xor", "version": 1, "params": {"length": 16}},
    "model": {"d_model": 8},
    "train": {"learning_rate": 0.01, "dtype": "float32"},
    "seed": 0,
}
LABELS = {"task": "xor", "arm": "gdn", "seed": 0, "role": "report"}
ROW = {"status": "ok", "test_accuracy": 0.75, "curve_step": [10, 20], "curve_val_accuracy": [0.5, 0.75]}


def configuration(seed=0, **task):
    return {**CONFIGURATION, "seed": seed, "task": {**CONFIGURATION["task"], **task}}


def test_round_trip(tmp_path):
    key = store.save(tmp_path, CONFIGURATION, LABELS, ROW, "cpu")
    store.save(tmp_path, configuration(1), {**LABELS, "seed": 1}, {"status": "error", "error": "boom"}, "cpu")
    rows = store.load(tmp_path)
    assert rows["key"].iloc[0] == key == store.cell_key(CONFIGURATION)
    assert rows["seed"].tolist() == [0, 1]
    assert rows["status"].tolist() == ["ok", "error"]
    assert list(rows["curve_val_accuracy"].iloc[0]) == [0.5, 0.75]
    assert rows["learning_rate"].tolist() == [0.01, 0.01]
    assert json.loads(rows["model"].iloc[0]) == {"d_model": 8}
    manifest = json.loads((tmp_path / "cells" / f"{key}.json").read_text())
    assert manifest["results_version"] == store.RESULTS_VERSION
    assert manifest["configuration"] == CONFIGURATION
    assert manifest["versions"]["torch"]
    assert {"device", "dtype", "seed", "task_version"} <= set(manifest)
    assert not [path for path in (tmp_path / "cells").iterdir() if path.suffix == ".tmp"]


def test_key_is_of_the_configuration_not_of_its_order():
    turned = dict(reversed(CONFIGURATION.items()))
    assert store.cell_key(turned) == store.cell_key(CONFIGURATION)
    assert store.cell_key(configuration(1)) != store.cell_key(CONFIGURATION)
    with pytest.raises(ValueError, match="JSON compliant"):
        store.cell_key({"x": float("nan")})


def test_a_cell_is_finished_only_when_its_parquet_file_is_there(tmp_path, monkeypatch):
    replace = os.replace

    def interrupted(source, target):
        if str(target).endswith(".parquet"):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.save(tmp_path, CONFIGURATION, LABELS, ROW, "cpu")
    assert store.finished(tmp_path) == set()
    assert store.environments(tmp_path) == []  # a manifest alone is no result
    with pytest.raises(FileNotFoundError, match="no finished cell"):
        store.load(tmp_path)
    monkeypatch.undo()
    key = store.save(tmp_path, CONFIGURATION, LABELS, ROW, "cpu")
    assert store.finished(tmp_path) == {key}
    assert len(store.load(tmp_path)) == 1


def test_versions_do_not_mix(tmp_path, monkeypatch):
    store.save(tmp_path, CONFIGURATION, LABELS, ROW, "cpu")
    monkeypatch.setattr(store, "RESULTS_VERSION", store.RESULTS_VERSION + 1)
    with pytest.raises(ValueError, match=r"holds results of version \[1\], this code computes version 2"):
        store.finished(tmp_path)
    store.save(tmp_path, configuration(1), {**LABELS, "seed": 1}, ROW, "cpu")
    with pytest.raises(ValueError, match=r"mixes results versions \[1, 2\]"):
        store.load(tmp_path)


def test_task_versions_do_not_mix(tmp_path):
    store.save(tmp_path, CONFIGURATION, LABELS, ROW, "cpu")
    store.save(tmp_path, configuration(1, version=2), {**LABELS, "seed": 1}, ROW, "cpu")
    with pytest.raises(ValueError, match=r"mixes task versions \{'xor': \[1, 2\]\}"):
        store.load(tmp_path)


def test_relabel_changes_names_only(tmp_path):
    store.save(tmp_path, CONFIGURATION, LABELS, ROW, "cpu")
    before = store.load(tmp_path)
    store.relabel(tmp_path, store.cell_key(CONFIGURATION), {**LABELS, "arm": "Gated DeltaNet"})
    after = store.load(tmp_path)
    assert after["arm"].tolist() == ["Gated DeltaNet"]
    assert after.drop(columns="arm").equals(before.drop(columns="arm"))


def test_order_of_the_grid_is_kept(tmp_path):
    for seed, arm in enumerate(["b", "a", "c"]):
        store.save(tmp_path, configuration(seed), {**LABELS, "seed": seed, "arm": arm}, ROW, "cpu")
    assert store.load(tmp_path)["arm"].tolist() == ["a", "b", "c"]
    store.remember_order(tmp_path, ["xor"], ["c", "b"])
    assert store.load(tmp_path)["arm"].tolist() == ["c", "b", "a"]


def test_bad_rows_and_lost_manifests_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"row: unknown columns \['accuracy'\]"):
        store.save(tmp_path, CONFIGURATION, LABELS, {"accuracy": 1.0}, "cpu")
    key = store.save(tmp_path, CONFIGURATION, LABELS, ROW, "cpu")
    (tmp_path / "cells" / f"{key}.json").unlink()
    with pytest.raises(ValueError, match="missing beside its Parquet file"):
        store.load(tmp_path)
