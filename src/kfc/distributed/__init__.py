"""Several ranks: collectives, packing, placement, asynchronous inverses, consistency."""
