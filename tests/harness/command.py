"The command `multigpu-ft`, as a module, which can be run in a fork."

import sys

from multigpu_ft.cli import main

if __name__ == "__main__":
    sys.argv[0] = "multigpu-ft"
    sys.exit(main())
