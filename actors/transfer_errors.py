"""What ends a weight transfer before its time."""

from __future__ import annotations

BROKE_OFF = "the weight transfer broke off"  # marks errors that somebody else has caused
BROADCAST_SHARE = 0.9  # of `timeout_s`; what is left is for receivers to say how they failed


class TransferBrokenError(RuntimeError):
    """A bucket does not arrive: a member of the group has died, hangs or has given up."""
