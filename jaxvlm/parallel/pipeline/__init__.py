"""Pipeline parallelism: schedules, and the forward and backward passes that follow them."""
