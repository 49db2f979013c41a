"""The weights of a bisection's trials: those of the crash, kept for as long as trials may need them.

A trainer removes what it published a few versions ago; a bisection takes hours. So the files get a second name (a hard
link; a copy on another disk) in the bisection's folder, until it has ended.

Failure policy: weights that are gone by then become the nearest that are there, or the base checkpoint, and a note says
so; files that can not be kept (a full disk) are used where they lie, and a note says that too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rltop.daemon.bisect_record import FOLDER, Crash, Record
from rltop.daemon.engines import published
from rltop.engines.requests import Required
from rltop.engines.trials import Subject

Copy = Callable[[Any, Any], Any]


def weights_of(crash: Crash, run_dir: Path, subject: Subject) -> tuple[Required, list[str]]:
    """The weights of the crash, not the newest: where they can still be loaded."""
    version = crash.weight_version
    if version in ("", "default"):
        notes = [] if version else ["the crash did not say which weights it had: the trials use the base checkpoint"]
        return Required(version="default", source="base", path=subject.model_path), notes
    there = {str(int(path.name.removeprefix("weight_v"))): path for path in published(run_dir)}
    if version in there:
        return Required(version=version, source="disk", path=str(there[version])), []
    if there:
        nearest = min(there, key=lambda name: (abs(int(name) - int(version)) if version.isdecimal() else 0, name))
        note = f"the weights of the crash ({version}) are not on disk: the trials use version {nearest}"
        return Required(version=nearest, source="disk", path=str(there[nearest])), [note]
    note = f"the weights of the crash ({version}) are not on disk: the trials use the base checkpoint"
    return Required(version="default", source="base", path=subject.model_path), [note]


def keep(record: Record, run_dir: Path, *, link: Copy = os.link, copy: Copy = shutil.copy2) -> None:
    """Keep them before the first trial. Nothing to do for a base checkpoint, or where an earlier daemon did it."""
    place = _place(record, run_dir)
    if record.weights.source != "disk" or (kept := place / Path(record.weights.path).name) == Path(record.weights.path):
        return
    if not Path(record.weights.path).is_dir():  # removed between the plan and its start
        record.weights, notes = weights_of(record.crash, run_dir, record.subject)
        record.notes += [note for note in notes if note not in record.notes]
        if record.weights.source != "disk":
            return
        kept = place / Path(record.weights.path).name
    try:
        shutil.rmtree(kept, ignore_errors=True)  # what an earlier daemon had begun
        _take(Path(record.weights.path), kept, link, copy)
    except OSError as error:
        shutil.rmtree(kept, ignore_errors=True)
        why = error.strerror or str(error)
        record.notes.append(
            f"weights {record.weights.version!r} can not be kept ({why}): trials end when the trainer removes them"
        )
        return
    record.weights = Required(
        version=record.weights.version, source="disk", path=str(kept), digest=record.weights.digest
    )


def _take(source: Path, kept: Path, link: Copy, copy: Copy) -> None:
    """A published version is a flat directory. Raises OSError."""
    kept.mkdir(parents=True)
    for file in sorted(one for one in source.iterdir() if one.is_file()):
        try:
            link(file, kept / file.name)
        except OSError:  # another file system, or one without hard links
            copy(file, kept / file.name)


def let_go(record: Record, run_dir: Path) -> None:
    """The bisection has ended, and no engine loads them any more."""
    with contextlib.suppress(OSError):
        shutil.rmtree(_place(record, run_dir))


def _place(record: Record, run_dir: Path) -> Path:
    return run_dir / FOLDER / record.id / "weights"
