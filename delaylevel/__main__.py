"""Entry point of ``python -m delaylevel``, the same as the ``delaylevel`` command."""

from delaylevel.cli.main import main

main()
