"""Who reduces what, who inverts what: the processes that train one model together."""

from kfc.distributed.workers import Workers, join_workers

__all__ = ["Workers", "join_workers"]
