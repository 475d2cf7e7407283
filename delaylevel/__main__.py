"""``python -m delaylevel`` is the ``delaylevel`` command."""

from delaylevel.cli.main import main

main()
