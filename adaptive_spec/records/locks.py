"""The advisory locks that are taken on PostgreSQL, all of them here: two uses of one key would wait for each other."""

from enum import IntEnum, unique


@unique
class LockKey(IntEnum):
    """What is locked -> its key.  SQLite has no such locks: who writes there is alone."""

    UPGRADE = 7_214_031_905  # held by the one process that migrates
    NUMBER = 7_214_031_906  # shared while rows are numbered, exclusive to learn which numbers are all there
    RUNS = 7_214_031_907  # held while a run is begun or claimed
    OVERRIDES = 7_214_031_909  # held while thresholds are set by hand
    ORDERS = 7_214_031_910  # held while an idempotency key is looked up and taken
    LEAD = 7_214_031_908  # held by the process that leads, for as long as its session lives
