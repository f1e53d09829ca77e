"""Where real-ray runs: Ray actors and the launcher, thin over `real_ray`."""
