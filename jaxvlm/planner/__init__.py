"""The planner: which strategy fits which hardware, its memory and its step time."""
