"""Where results live: under ``RUN/cells`` a finished cell is one Parquet file (a row) beside one JSON
manifest.

A cell is named by the hash of its canonical configuration. Both files are written to a temporary name and
renamed, the Parquet file last: a cell is finished exactly when its Parquet file exists. Interrupting a run
therefore loses at most the cells in flight, and running it again computes what is missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

RESULTS_VERSION = 1
"""Raised by any change that moves numbers (initialisation, data streams, optimiser, evaluation)."""

_CURVE = pa.list_(pa.float64())
SCHEMA = pa.schema(
    {
        "key": pa.string(),
        "status": pa.string(),  # "ok", "diverged" (a non-finite loss or gradient), "error" (an exception)
        "error": pa.string(),
        "test_accuracy": pa.float64(),
        "test_loss": pa.float64(),
        "test_slices": pa.string(),  # JSON: slice -> value -> [accuracy, positions], see tasks.by_slice
        "val_accuracy": pa.float64(),
        "val_loss": pa.float64(),
        "chance": pa.float64(),
        "majority": pa.float64(),
        "ceiling": pa.float64(),
        "parameters": pa.int64(),
        "state_size": pa.int64(),
        "steps_done": pa.int64(),
        "seconds": pa.float64(),
        "members": pa.int64(),
        "scan_backend": pa.string(),
        "curve_step": pa.list_(pa.int64()),
        "curve_train_loss": _CURVE,
        "curve_val_loss": _CURVE,
        "curve_val_accuracy": _CURVE,
    }
)
_LABELS = ("task", "arm", "seed", "role")


def canonical_json(configuration: Mapping[str, Any]) -> str:
    """One text per configuration: sorted keys, no spaces, no NaN. What is hashed and what is compared."""
    return json.dumps(configuration, sort_keys=True, separators=(",", ":"), allow_nan=False)


def cell_key(configuration: Mapping[str, Any]) -> str:
    """Name of a cell: 20 hexadecimal digits of the SHA-256 of its canonical configuration."""
    return hashlib.sha256(canonical_json(configuration).encode()).hexdigest()[:20]


def environment(device: str) -> dict[str, Any]:
    """Library versions and the device, as a manifest records them."""
    versions = {"python": platform.python_version()}
    for name in ("prism-lab", "torch", "triton", "numpy", "pandas", "pyarrow", "scipy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {"versions": versions, "device": device, "device_name": _device_name(device)}


def save(
    out: Path | str,
    configuration: Mapping[str, Any],
    labels: Mapping[str, Any],
    row: Mapping[str, Any],
    device: str,
) -> str:
    """Write one finished cell and return its key.

    row: columns of SCHEMA but the key; what it lacks is stored as null, an unknown column raises ValueError.
    """
    unknown = sorted(set(row) - set(SCHEMA.names))
    if unknown:
        raise ValueError(f"row: unknown columns {unknown}; expected some of {SCHEMA.names}")
    key = cell_key(configuration)
    folder = _cells(out)
    folder.mkdir(parents=True, exist_ok=True)
    _write_manifest(folder, key, configuration, labels, environment(device))
    table = pa.Table.from_pylist([{**row, "key": key}], schema=SCHEMA)
    temporary = folder / f".{key}.{os.getpid()}.tmp"
    pq.write_table(table, temporary)
    _rename(temporary, folder / f"{key}.parquet")
    return key


def relabel(out: Path | str, key: str, labels: Mapping[str, Any]) -> None:
    """Give a finished cell the names that the present grid uses; the result itself is not touched."""
    folder = _cells(out)
    manifest = _read_manifest(folder / f"{key}.json")
    if any(manifest[name] != labels[name] for name in _LABELS):
        where = {name: manifest[name] for name in ("versions", "device", "device_name")}
        _write_manifest(folder, key, manifest["configuration"], labels, where)


def retire(out: Path | str, reported: Mapping[str, tuple[str, str]]) -> list[str]:
    """Mark as "stale" what an earlier grid reported under the same names from another configuration.

    reported: key -> (task, arm) of the present grid's cells. Stale cells stay in the store, out of tables and
    claims, and are reported again when a grid asks for them. Returns their keys.
    """
    configurations: dict[tuple[str, str], set[str]] = {}
    manifests = {key: _read_manifest(_cells(out) / f"{key}.json") for key in finished(out)}
    for key, names in reported.items():
        if key in manifests:
            configurations.setdefault(names, set()).add(_without_seed(manifests[key]))
    stale = []
    for key, manifest in manifests.items():
        known = configurations.get((manifest["task"], manifest["arm"]))
        if manifest["role"] == "report" and known is not None and _without_seed(manifest) not in known:
            relabel(out, key, {**{name: manifest[name] for name in _LABELS}, "role": "stale"})
            stale.append(key)
    return stale


def _without_seed(manifest: Mapping[str, Any]) -> str:
    return canonical_json({**manifest["configuration"], "seed": None})


def finished(out: Path | str) -> set[str]:
    """Keys of the finished cells; raises ValueError where they belong to another results_version."""
    folder = _cells(out)
    keys = {path.stem for path in folder.glob("*.parquet")} if folder.is_dir() else set()
    found = {_read_manifest(folder / f"{key}.json")["results_version"] for key in keys}
    if found - {RESULTS_VERSION}:
        raise ValueError(
            f"out: {out} holds results of version {sorted(found)}, this code computes version "
            f"{RESULTS_VERSION}; numbers of different versions are not comparable. Use another directory."
        )
    return keys


def statuses(out: Path | str, keys: Iterable[str]) -> dict[str, str]:
    """Status of each finished cell among `keys`."""
    folder = _cells(out)
    return {key: pq.read_table(folder / f"{key}.parquet", columns=["status"])[0][0].as_py() for key in keys}


def load(out: Path | str) -> pd.DataFrame:
    """All finished cells of a run, a row per (configuration, task, seed), failures included.

    Beside SCHEMA's columns: task, arm, seed, role ("report", or "selection" for the cells that chose a
    learning rate), learning_rate, dtype, device, task_name, task_version, and `model`, `train`, `task_params`
    as canonical JSON.

    Raises FileNotFoundError where nothing is stored and ValueError where versions would mix.
    """
    folder = _cells(out)
    paths = sorted(folder.glob("*.parquet")) if folder.is_dir() else []
    if not paths:
        raise FileNotFoundError(f"out: no finished cell under {folder}")
    manifests = [_read_manifest(path.with_suffix(".json")) for path in paths]
    _refuse_mixture(out, manifests)
    results = pd.concat([pq.read_table(path, schema=SCHEMA).to_pandas() for path in paths], ignore_index=True)
    described = pd.DataFrame([_described(manifest) for manifest in manifests])
    order = _read_order(out)

    def place(column: pd.Series) -> pd.Series:
        known = {name: i for i, name in enumerate(order.get(str(column.name), []))}
        return (
            column.map(lambda name: (known.get(name, len(known)), name)) if column.name in order else column
        )

    by = ["task", "arm", "role", "learning_rate", "seed"]
    return pd.concat([described, results], axis=1).sort_values(by, key=place, ignore_index=True)


def environments(out: Path | str) -> list[dict[str, Any]]:
    """Where the finished cells of a run were trained: every different device and set of versions."""
    found: list[dict[str, Any]] = []
    for path in sorted(_cells(out).glob("*.parquet")):
        manifest = _read_manifest(path.with_suffix(".json"))
        where = {name: manifest[name] for name in ("device", "device_name", "versions")}
        if where not in found:
            found.append(where)
    return found


def remember_order(out: Path | str, tasks: Iterable[str], arms: Iterable[str]) -> None:
    """Keep the order of a grid's tasks and arms for `load`; what is known already stays first."""
    order = _read_order(out)
    for kind, names in (("task", tasks), ("arm", arms)):
        order[kind] = list(dict.fromkeys([*order.get(kind, []), *names]))
    Path(out).mkdir(parents=True, exist_ok=True)
    temporary = Path(out) / f".order.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(order, indent=1) + "\n")
    _rename(temporary, Path(out) / "order.json")


def _read_order(out: Path | str) -> dict[str, list[str]]:
    path = Path(out) / "order.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _described(manifest: Mapping[str, Any]) -> dict[str, Any]:
    configuration = manifest["configuration"]
    return {
        **{name: manifest[name] for name in _LABELS},
        "learning_rate": configuration["train"]["learning_rate"],
        "dtype": configuration["train"]["dtype"],
        "device": manifest["device"],
        "task_name": configuration["task"]["name"],
        "task_version": configuration["task"]["version"],
        "task_params": canonical_json(configuration["task"]["params"]),
        "model": canonical_json(configuration["model"]),
        "train": canonical_json(configuration["train"]),
    }


def _refuse_mixture(out: Path | str, manifests: list[dict[str, Any]]) -> None:
    versions = sorted({manifest["results_version"] for manifest in manifests})
    if len(versions) > 1:
        raise ValueError(f"out: {out} mixes results versions {versions}; they are not comparable")
    of_task: dict[str, set[Any]] = {}
    for manifest in manifests:
        task = manifest["configuration"]["task"]
        of_task.setdefault(task["name"], set()).add(task["version"])
    mixed = {name: sorted(found) for name, found in of_task.items() if len(found) > 1}
    if mixed:
        raise ValueError(f"out: {out} mixes task versions {mixed}; they are not comparable")


def _write_manifest(
    folder: Path,
    key: str,
    configuration: Mapping[str, Any],
    labels: Mapping[str, Any],
    where: Mapping[str, Any],
) -> None:
    manifest = {
        **{name: labels[name] for name in _LABELS},
        "results_version": RESULTS_VERSION,
        "configuration": configuration,
        "dtype": configuration["train"]["dtype"],
        "task_version": configuration["task"]["version"],
        **where,
    }
    temporary = folder / f".{key}.json.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(manifest, indent=2, allow_nan=False) + "\n")
    _rename(temporary, folder / f"{key}.json")


def _rename(temporary: Path, final: Path) -> None:
    # Without the sync a power cut may leave the new name on an empty file.
    with temporary.open("rb") as handle:
        os.fsync(handle.fileno())
    os.replace(temporary, final)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(
            f"out: {path} is missing beside its Parquet file; delete the pair to recompute it"
        ) from None


def _cells(out: Path | str) -> Path:
    return Path(out) / "cells"


def _device_name(device: str) -> str:
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()
