"""Reads the file that an offline W&B run leaves: protobuf records in LevelDB's log format."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

BLOCK, HEADER = 32768, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[Any]:
    """All records, in order."""
    content = path.read_bytes()
    assert content[:4] == b":W&B"
    position, collected = HEADER, b""
    while position + HEADER <= len(content):
        left = BLOCK - position % BLOCK
        if left < HEADER:  # the end of a block is padding
            position += left
            continue
        size = int.from_bytes(content[position + 4 : position + 6], "little")
        kind = content[position + 6]
        data = content[position + HEADER : position + HEADER + size]
        position += HEADER + size
        collected = data if kind in (FULL, FIRST) else collected + data
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(collected)
            yield record


def history(path: Path) -> list[dict[str, Any]]:
    """What was logged, step by step, with W&B's own "_step"."""
    steps = []
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            values = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
            steps.append({**values, "_step": record.history.step.num})
    return steps


def axes(path: Path) -> set[tuple[str, str]]:
    """Metrics, by name or pattern, and what they are drawn over."""
    metrics = [record.metric for record in records(path) if record.WhichOneof("record_type") == "metric"]
    return {(metric.glob_name or metric.name, metric.step_metric) for metric in metrics}
