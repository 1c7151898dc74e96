"""Compile a candidate for machines that need not exist, and read the compiled program."""
