"""Search for the fastest candidate that fits, and reasons why the others lost."""
