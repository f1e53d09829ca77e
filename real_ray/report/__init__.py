"""What is made of a run's records for people to look at."""
