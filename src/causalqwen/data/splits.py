"""Fixed splits of records by entity."""

import hashlib
from collections.abc import Sequence
from typing import Any


def split_by_entity(
    records: Sequence[dict[str, Any]], sizes: dict[str, int], seed: int = 0
) -> dict[str, list[dict[str, Any]]]:
    """Disjoint parts of about these sizes; records with one `entity` never fall into two parts.

    The order is that of a hash of the entity, then of `name`, so that it does not depend on that of the records.
    ValueError where there are fewer records than asked for.
    """
    if len(records) < sum(sizes.values()):
        raise ValueError(f"{sum(sizes.values())} records asked for, {len(records)} there")

    def rank(record: dict[str, Any]) -> tuple[str, str]:
        key = f"{seed}/{record['entity']}".encode()
        return hashlib.sha256(key).hexdigest(), record["name"]

    ordered, parts, start = sorted(records, key=rank), {}, 0
    for name, size in sizes.items():
        end = start + size
        while 0 < end < len(ordered) and ordered[end]["entity"] == ordered[end - 1]["entity"]:
            end += 1
        parts[name] = ordered[start:end]
        start = end
    return parts
