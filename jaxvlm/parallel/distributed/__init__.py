"""Runs in several processes: initialization, preemption, and failure detection."""
