"""``python -m jaxvlm`` is ``jaxvlm``."""

from jaxvlm.cli.main import main

main()
