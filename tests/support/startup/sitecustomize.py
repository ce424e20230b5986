"""Python runs this first in the processes of tests and of their jobs, where it is on PYTHONPATH.

To look for garbage takes a third of their time otherwise, while torch is imported and at the end.
"""

import atexit
import ctypes
import gc
import os

gc.set_threshold(20_000, 10, 50)
atexit.register(gc.freeze)
if "TIMER_SLACK" in os.environ:
    ctypes.CDLL(None).prctl(29, int(os.environ["TIMER_SLACK"]))  # 29 is PR_SET_TIMERSLACK
