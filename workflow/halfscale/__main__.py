"""``python -m halfscale``: a workflow's job goes to its warm worker, anything else runs here."""

import os
import sys

from halfscale.warm.client import hand_over

status = hand_over(sys.argv[1:])
if status is not None:
    sys.stdout.flush()
    os._exit(status)  # an interpreter that has done nothing needs no teardown

from halfscale.cli import app  # noqa: E402 - imports that a warm job does without

app(prog_name="halfscale")
