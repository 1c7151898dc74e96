"""A run: ``Trainer``, its parts, its files, dry run, ``auto`` settings, out-of-memory advice."""
