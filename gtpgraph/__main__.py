"""``python -m gtpgraph``: the command line."""

import sys

from gtpgraph.cli import main

if __name__ == "__main__":  # ranks that are started here import this module again
    sys.exit(main())
