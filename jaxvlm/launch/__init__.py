"""Jobs for schedulers: text for each target, and one call of the user's own tool."""
