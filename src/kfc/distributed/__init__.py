"""Who reduces what, who inverts what: the processes that train one model together."""

from kfc.distributed.workers import WorkerError, Workers, join_workers

__all__ = ["WorkerError", "Workers", "join_workers"]
