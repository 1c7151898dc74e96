"""Bad input of every kind that a user can hand in; `python -m tests.bad_input --help`."""
