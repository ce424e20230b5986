"""Python runs this first in the processes of tests and of their jobs, where it is on PYTHONPATH.

To look for garbage takes a third of their time otherwise, while torch is imported and at the end.
"""

import atexit
import gc

gc.set_threshold(20_000, 10, 50)
atexit.register(gc.freeze)
