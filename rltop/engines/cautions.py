"""What people should know before they say yes to a plan: that nobody would serve, or that arms differ already.

A caution refuses nothing. Pure: it reads engines and says a sentence, or "".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rltop.engines.chores import model_config
from rltop.engines.requests import VERSION, Config
from rltop.engines.supervisor import Engine
from rltop.engines.toggles import read_argv


def nobody_serves(engines: Mapping[str, Engine], leaving: Collection[str], until: str) -> str:
    """These engines leave the rotation together and no other one serves now; until: which time that is."""
    others = [one for one in engines.values() if one.id not in leaving]
    if not leaving or any(one.slot.serves() for one in others):
        return ""
    states = ", ".join(f"engine {one.id} is {one.slot.state}" for one in others)
    return f"warning: no engine serves {until}; rollouts wait" + (f" ({states})" if states else "")


def unlike(configs: Mapping[str, Config], engines: Mapping[str, Engine]) -> str:
    """In which toggles these arguments, by engine, differ from each other; "" where they are all the same."""
    first = next(iter(configs.values()), None)
    if all(config == first for config in configs.values()):
        return ""
    asked = {name: _asked(config, engines[name]) for name, config in configs.items()}
    words = []
    for toggle in sorted({toggle for one in asked.values() for toggle in one}):
        holders: dict[str, list[str]] = {}
        for name, one in asked.items():
            holders.setdefault(one.get(toggle, "not given"), []).append(name)
        if len(holders) > 1:
            told = ", ".join(f"{value} ({' '.join(names)})" for value, names in holders.items())
            words.append(f"{toggle} {told}")
    return "; ".join(words) or "in arguments or variables that are no toggle"


def _asked(config: Config, engine: Engine) -> dict[str, str]:
    record = engine.record
    model = model_config(record.declared.model_path)
    return read_argv(config.args, config.env, version=record.version or VERSION, model=model)
