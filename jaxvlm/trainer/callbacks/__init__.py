"""What a run does around its train steps, one subject a callback."""
