"""AdamW, learning-rate schedules, and path patterns of frozen and decayed parameters."""
