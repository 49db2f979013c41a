"""`rltop ps --prune`: the quota over all runs, and leftovers of killed ones. Nothing goes without being named."""

from __future__ import annotations

import time

from rltop.cli.output import age, note, print_json, size, table
from rltop.runs import list_runs
from rltop.settings import load_settings


def prune(*, as_json: bool, dry_run: bool) -> int:
    """Remove (or with `dry_run` only name) and print. Exit code 1 when something could not be removed."""
    from rltop.daemon.housekeeping import prune as run_prune

    settings = load_settings()
    found = run_prune(settings, list_runs(), dry_run=dry_run)
    if as_json:
        print_json(
            {
                "dry_run": dry_run,
                "runs": [
                    {"run": doomed.weighed.run.name, "path": str(doomed.weighed.run.path)}
                    | {"bytes": doomed.weighed.bytes, "touched": doomed.weighed.touched, "why": doomed.why}
                    for doomed in found.runs
                ],
                "leftovers": [{"path": str(left.path), "bytes": left.bytes} for left in found.leftovers],
                "problems": found.problems,
                "left_bytes": found.left_bytes,
                "runs_bytes": settings.runs_bytes,
            }
        )
        return 1 if found.problems else 0
    now, verb = time.time(), "would go" if dry_run else "removed"
    rows = [
        [doomed.weighed.run.name, size(doomed.weighed.bytes), f"{age(now - doomed.weighed.touched)} ago", doomed.why]
        for doomed in found.runs
    ]
    rows += [[str(left.path), size(left.bytes), "-", "left over by a killed run"] for left in found.leftovers]
    if rows:
        print("\n".join(table((verb, "size", "last change", "why"), rows)))
    for problem in found.problems:
        note(f"not removed: {problem}")
    head = "" if rows else "nothing to remove; "
    take = "would take" if dry_run else "take"
    note(f"{head}all runs {take} {size(found.left_bytes)}; the quota is {size(settings.runs_bytes)}")
    return 1 if found.problems else 0
