"""Show the comparisons of `prism.verify`: a line per identity and backend, and every tensor that is off."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ablations.report import console

if TYPE_CHECKING:
    from prism.verify import Comparison


def run_and_print(device: str = "cpu") -> bool:
    """Run all comparisons on a device and print them; True where some passed and none failed."""
    import torch

    from prism import verify

    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: expected one that is here, got {device!r} and no CUDA GPU was found")
    return show(verify.run(device=device), device)


def show(comparisons: Sequence[Comparison], device: str) -> bool:
    """Print the comparisons and what they come to; see `run_and_print`."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    screen = console()
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for comparison in comparisons:
        groups.setdefault((comparison.backend, comparison.identity), []).append(comparison)
    table = Table(box=box.SIMPLE_HEAD, title=f"On {escape(device)}", title_justify="left")
    for heading in ("backend", "identity", "result", "largest error", "tolerance"):
        table.add_column(heading)
    for (backend, identity), members in groups.items():
        compared = [one for one in members if one.status != "skipped"]
        if not compared:
            table.add_row(backend, escape(identity), "skipped", escape(members[0].note), "")
            continue
        worst = max(compared, key=_size)
        result = f"{len(compared)} equal" if all(one.ok for one in compared) else "FAILED"
        where = f"{worst.error:.1e} ({worst.tensor})"
        table.add_row(backend, escape(identity), result, escape(where), f"{worst.tolerance:g}")
    screen.print(table)
    failed = [one for one in comparisons if one.status == "failed"]
    passed = [one for one in comparisons if one.status == "passed"]
    for one in failed:
        where = f"{one.identity}, {one.backend}: {one.tensor}"
        text = f"FAILED: {where} is off by {one.error:.3g}, allowed {one.tolerance:g}"
        screen.print(escape(text), highlight=False, soft_wrap=True)
    if not failed and not passed:
        screen.print("FAILED: nothing was compared", highlight=False)
    skipped = len(comparisons) - len(failed) - len(passed)
    ran = ", ".join(dict.fromkeys(one.backend for one in comparisons if one.status != "skipped"))
    screen.print(
        f"{len(passed)} comparisons passed, {len(failed)} failed, {skipped} skipped; "
        f"backends that ran: {ran or 'none'}.",
        highlight=False,
        soft_wrap=True,
    )
    return bool(passed) and not failed


def _size(comparison: Comparison) -> float:
    return math.inf if math.isnan(comparison.error) else comparison.error
