"""Benchmarks whose parts run in processes of their own: all get ready at the same time, then each is timed
while the others wait.

A part prints READY once everything is compiled, waits for a line on stdin, and prints each of its results
as a line `ROW {json}`; what else it prints is passed on. Where stdin ends instead, as when the process that
started the parts has ended, the part ends too: those left behind would be timed at once, beside the next run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def wait_for_turn() -> None:
    print("READY", flush=True)
    if not sys.stdin.readline():
        raise SystemExit("no turn will come: stdin has ended")


def report(row: dict[str, Any]) -> None:
    print("ROW " + json.dumps(row), flush=True)


class Part:
    """A part's process and the lines that it has printed."""

    def __init__(self, name: str, command: list[str], env: dict[str, str] | None = None) -> None:
        self.name = name
        self.lines: list[str] = []
        self.ready, self.done = threading.Event(), threading.Event()
        # A session of its own, so that what it starts ends with it.
        self.process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                if line == "READY\n":
                    self.ready.set()
                elif line.startswith("ROW "):
                    self.lines.append(line[4:])
                else:
                    print(f"{self.name}: {line}", end="", flush=True)
        self.process.wait()
        self.done.set()
        self.ready.set()

    def stop_unless(self, event: threading.Event) -> None:
        if not event.is_set():
            print(f"{self.name} was stopped", flush=True)
            with contextlib.suppress(ProcessLookupError):  # it has ended just now
                os.killpg(self.process.pid, signal.SIGKILL)
            self.done.wait()

    def rows(self, seconds: float) -> list[dict[str, Any]]:
        """Its results, once it has had its turn; those printed so far if it takes longer."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self.process.stdin as line:
            line.write("go\n")
        self.done.wait(seconds)
        self.stop_unless(self.done)
        if self.process.returncode:
            print(f"{self.name} ended with exit code {self.process.returncode}", flush=True)
        return [json.loads(line) for line in self.lines]


def get_ready(parts: list[Part], seconds: float, gate: Path | None) -> None:
    """Returns when all parts are ready, those stopped that are not within `seconds`, and the file `gate` is
    there: what is not to be timed beside other work is not."""
    began = time.perf_counter()
    for part in parts:
        part.ready.wait(max(0.0, seconds - (time.perf_counter() - began)))
        print(f"{part.name}: {time.perf_counter() - began:.0f} s until ready", flush=True)
    for part in parts:  # or it would compile on while others are timed
        part.stop_unless(part.ready)
    while gate is not None and not gate.exists():
        time.sleep(0.05)


def with_kept(
    kept: list[dict[str, Any]], rows: list[dict[str, Any]], same: tuple[str, ...], measured: str
) -> list[dict[str, Any]]:
    """Kept rows and new ones, of which a new one counts where both have the values of `same`, unless it has
    nothing under the name `measured` and the kept one has."""

    def of(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in same)

    good = {of(r) for r in kept if measured in r}
    new = [r for r in rows if measured in r or of(r) not in good]
    return [r for r in kept if of(r) not in {of(n) for n in new}] + new


def take_turns(
    parts: list[Part],
    seconds: float,
    turn: float,
    gate: Path | None,
    write: Callable[[list[dict[str, Any]]], object],
) -> list[dict[str, Any]]:
    """Results of all parts in order, handed to `write` after every turn: what ends the process leaves what
    was measured. turn: how long one may take to be timed. The rest as in `get_ready`."""
    get_ready(parts, seconds, gate)
    rows: list[dict[str, Any]] = []
    for part in parts:
        rows += part.rows(turn)
        write(rows)
    return rows
