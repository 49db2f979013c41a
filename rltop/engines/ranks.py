"""The ranks of a `/weights_checker` checksum answer, of 0.5.14 and 0.5.23."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rltop.engines.engine_layout import Shard


def ranks_of(answer: Mapping[str, Any]) -> list[tuple[Shard, dict[str, str]]]:
    """Tensor parallel rank and digests of each rank of an engine; its pipeline stages are put together.

    Of data parallel copies each is there. Raises nothing: what is no rank is left out.
    """
    found: dict[tuple[int, int, int], dict[str, str]] = {}
    for rank in answer.get("ranks") or ():
        if not isinstance(rank, dict) or not isinstance(rank.get("checksums"), dict):
            continue
        place = rank.get("parallelism_info")
        if isinstance(place, list):  # 0.5.23: of the model, then of a draft model
            place = place[0] if place else {}
        place = place if isinstance(place, dict) else {}
        key = (int(place.get("dp_rank") or 0), int(place.get("tp_rank") or 0), int(place.get("tp_size") or 1))
        found.setdefault(key, {}).update(rank["checksums"])
    return [(Shard(tp_rank, tp_size), held) for (_, tp_rank, tp_size), held in sorted(found.items())]
