"""Ask SGLang again and write its answers: `python -m tests.soak.sglang_arguments.record` from the checkout."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.soak.sglang_arguments import Sglang, releases
from tests.soak.sglang_arguments.cases import MODELS, cases
from tests.soak.sglang_arguments.recording import DATA, device_of, write


def ask(sglang: Sglang, models: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(bases, every case with the answer). Minutes."""
    bases: dict[str, Any] = {}
    asked = list(cases(sglang.version))
    answers: dict[int, Mapping[str, Any]] = {}
    for device in ("cuda", "cpu"):
        places = [place for place, case in enumerate(asked) if device_of(case) == device]
        plain = [{"model": model, "argv": []} for model in MODELS]
        found = sglang.answers([*plain, *(asked[place] for place in places)], models, device)
        for case, base in zip(plain, found, strict=False):
            bases[f"{case['model']}/{device}"] = base["fields"]
        answers |= dict(zip(places, found[len(plain) :], strict=True))
    return bases, [case | dict(answers[place]) for place, case in enumerate(asked)]


def main() -> None:
    """Record both releases."""
    for sglang in releases():
        with tempfile.TemporaryDirectory() as models:
            write(DATA / f"{sglang.version}.jsonl", sglang.version, *ask(sglang, Path(models)))


if __name__ == "__main__":
    main()
