"""Simulations: what a run will take, from the real driver on roles that only take time."""

from real_ray.simulate.distributions import Distribution, constant, parse_distribution
from real_ray.simulate.plan import PlanResult, run_plan, simulate
from real_ray.simulate.timings import Timings, timings_of_run
from real_ray.simulate.virtual_time import run_in_virtual_time

__all__ = [
    "Distribution",
    "PlanResult",
    "Timings",
    "constant",
    "parse_distribution",
    "run_in_virtual_time",
    "run_plan",
    "simulate",
    "timings_of_run",
]
