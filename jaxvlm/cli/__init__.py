"""The command line: one module per command, and the only place where absl's flags are used."""
