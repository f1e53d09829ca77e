"""Where a run is recorded and shown. Every record goes to all trackers of the run."""

from real_ray.tracking.base import Tracker, Trackers
from real_ray.tracking.run_dir import RunDirectory, check_may_begin

__all__ = ["RunDirectory", "Tracker", "Trackers", "check_may_begin"]
