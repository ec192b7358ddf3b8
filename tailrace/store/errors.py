"""What can go wrong with the store."""


class StoreUnavailable(Exception):
    """etcd did not answer in time. What was last read from it still holds, for all that is known.

    A write that ends so may have been done.
    """


class LeaseExpired(StoreUnavailable):
    """The lease that a value was to hang on is gone."""
