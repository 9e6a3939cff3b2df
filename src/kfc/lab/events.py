"""Events for TensorBoard, written without a thread.

torch's SummaryWriter writes from a thread, which would lose an error such as a full disk.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter


class Events:
    """A new file of events; TensorBoard discards those from update ``first`` on in older files."""

    def __init__(self, folder: Path, first: int) -> None:
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        # A number, since several files may be written within a second.
        number = len(list(folder.glob("events.out.tfevents.*")))
        self._writer = RecordWriter((folder / f"{name}.{number}").open("wb"))
        self._write(file_version="brain.Event:2")
        self._write(step=first, session_log=SessionLog(status=SessionLog.START))

    def write(self, row: Mapping[str, Any]) -> None:
        """Write the numbers of a row of metrics."""
        values = {f"{row['kind']}/{k}": v for k, v in row.items() if isinstance(v, float)}
        entries = [Summary.Value(tag=tag, simple_value=v) for tag, v in values.items()]
        self._write(step=row["update"], summary=Summary(value=entries))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _write(self, **content: Any) -> None:
        self._writer.write(Event(wall_time=time.time(), **content).SerializeToString())
