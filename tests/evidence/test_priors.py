"""The table of priors: what ships, what a user may replace, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from rltop.bisect.space import space
from rltop.errors import RltopError
from rltop.evidence.priors import SHIPPED, load, parse
from rltop.settings import priors_path


def test_every_number_that_ships_has_a_source() -> None:
    found = load()
    named = {f"toggles.{name}" for name in found.priors.weights}
    named |= {"together." + "+".join(sorted(pair)) for pair in found.priors.affinity or ()}
    named |= {f"kernels.{family.name}" for family in found.families}
    assert set(found.sources) == named
    assert all(found.sources.values())


def test_the_most_frequent_toggles_are_as_often_as_the_threads_say() -> None:
    weights = load().priors.weights
    assert 0.35 <= weights["cuda_graph"] + weights["cuda_graph_padding"] <= 0.40
    assert 0.20 <= weights["speculative"] <= 0.25
    assert 0.10 <= weights["overlap_schedule"] <= 0.12
    assert {"memory", "resume_order"} <= set(weights)


def test_a_users_file_replaces_what_it_names_and_leaves_the_rest(tmp_path: Path) -> None:
    mine = tmp_path / "bisect-priors.toml"
    mine.write_text(
        """
        [prior]
        none = 0.2
        [toggles.my_flag]
        weight = 0.5
        [[together]]
        toggles = ["speculative", "cuda_graph"]
        factor = 1.0
        [[kernels]]
        family = "DeepEP"
        pattern = "my_dispatch"
        factors = { deepep = 2.0 }
        [phases]
        verify = { speculative = 2.0 }
        """
    )
    shipped, found = load(), load(mine)
    assert found.priors.none == 0.2
    assert found.priors.other == shipped.priors.other
    assert found.priors.weights == {**shipped.priors.weights, "my_flag": 0.5}
    assert (found.priors.affinity or {})[frozenset({"cuda_graph", "speculative"})] == 1.0
    assert [family.pattern for family in found.families if family.name == "DeepEP"] == ["my_dispatch"]
    assert len(found.families) == len(shipped.families)
    assert found.phases == {**shipped.phases, "verify": {"speculative": 2.0}}
    assert found.signs == shipped.signs
    assert space(("my_flag", "hicache"), found.priors).prior[1] > 0.4


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[prior", "is no TOML"),
        ("version = 2", "version must be 1"),
        ("[toggels.a]\nweight = 1", "unknown key 'toggels'"),
        ("[toggles.a]\nweight = 0", "weight must be a number above 0"),
        ("[toggles.a]\nweight = nan", "weight must be a number above 0"),
        ("[toggles.a]\nwieght = 1", "unknown key 'wieght'"),
        ("toggles.a = 1", "must be a table"),
        ("[prior]\nnone = 0.99", "none and other must be less than 1"),
        ("[prior]\npairs = true", "pairs must be a number above 0"),
        ('[[together]]\ntoggles = ["a", "a"]\nfactor = 2', "toggles must be two names"),
        ('[[kernels]]\nfamily = "a"\npattern = "("\nfactors = {}', "pattern is no regular expression"),
        ("[phases]\nverify = 3", "must be factors of toggles"),
        ("[signs]\npaded = { a = 1 }", "unknown key 'paded'"),
    ],
)
def test_a_wrong_table_is_one_clear_error(text: str, told: str) -> None:
    with pytest.raises(RltopError, match=r"mine\.toml") as error:
        parse(text, where="mine.toml", base=load())
    assert told in str(error.value)


def test_a_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(RltopError, match=r"gone\.toml"):
        load(tmp_path / "gone.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RltopError, match="is no text"):
        load(tmp_path / "binary.toml")


def test_the_users_file_is_looked_for_beside_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLTOP_CONFIG", str(tmp_path / "rltop.toml"))
    assert priors_path() is None
    (tmp_path / "bisect-priors.toml").write_text("version = 1\n")
    assert priors_path() == tmp_path / "bisect-priors.toml"
    assert load(priors_path()).priors == load().priors


def test_the_shipped_table_is_package_data() -> None:
    from importlib import resources

    assert resources.files("rltop.bisect").joinpath(SHIPPED).is_file()
