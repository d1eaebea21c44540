"""`python -m autotp.cli`, for where the console command is not on the path."""

import sys

from .main import main

if __name__ == "__main__":
    sys.exit(main())
